"""Progress: who polls a transport's links, and how everybody else sleeps.

The thread that waits for a result polls by itself: handing the work to another thread would cost a wake-up (5-45 us), more
than the transfer. At most one thread polls at a time, under a try-lock (the *role*). It spins, yielding, for at most
``spin_us``, then arms the links' doorbells and sleeps on their descriptors. When nobody waits, one background thread sleeps
there, so that requests of peers are served; it also watches sockets (new peers, lost peers).

Nothing relies on a bell alone: pure Python has no store-load fence, so a bell may be missed, and every sleep ends
after TICK_S.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from runtime.deadline import Deadline
from runtime.transport.onesided.link import Link
from runtime.transport.onesided.spinning import Spinning

TICK_S = 0.004
# A link without a descriptor (its binding does not show one) is polled this often.
_BLIND_TICK_S = 0.001
_TAKEOVER_S = 0.001
# Looks at the links before the first yield: about as long as a small fetch takes, so that on a busy machine it need not give
# its processor away. Short enough to do no harm where both ends share one.
_FIRST_LOOKS = 40
_LAST_LOOKS = 64


class Member(Protocol):
    """What Progress polls: an endpoint. All methods may be called by any thread, also after its link is closed."""

    link: Link
    peek: Callable[[], object]  # the link's; False: ``progress`` would find nothing
    disarm: Callable[[], None]  # the link's

    def progress(self, wait: bool = False) -> bool:
        """Poll once and handle what came; True if anything did. Never raises.

        Does nothing while another thread uses the link, unless ``wait``: then it lets that thread finish, a copy at most."""

    def expects(self) -> bool:
        """Is something under way whose end somebody may wait for without polling? Takes no lock."""

    def lost(self, error: BaseException) -> None:
        """The peer is gone."""

    def expire(self, now_ns: int) -> None:
        """Fail what has passed its deadline; called about every TICK_S."""


class Progress:
    """Drives the links of one transport. The background thread starts with the first member or watched descriptor."""

    def __init__(self, name: str, spin_us: int, spin_max_us: int) -> None:
        self._name = name
        # For an answer, and for whatever a peer may want: two different waits.
        self._waiting = Spinning(spin_us, spin_max_us)
        self._serving = Spinning(spin_us, spin_max_us)
        self._idle_ns = 0  # when the background thread found nothing more to do
        self._role = threading.Lock()
        self._background = False  # the background thread holds the role: a waiter may ask for it
        self._wanted = False
        self._guard = threading.Lock()
        self._members: tuple[Member, ...] = ()
        self._by_fd: dict[int, Member] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._rung: set[int] = set()  # descriptors whose one shot has fired and that nobody has armed again
        self._blind = 0
        # Members whose bell may be silent, because arming it costs and nothing was expected, or because it has rung. Who has the
        # role adds to it. They are armed when something is expected, or at the first tick within which nobody drove.
        self._unarmed: set[Member] = set()
        self._driven = False
        # The background thread was woken, but somebody had the role, and had perhaps looked for the last time.
        self._missed = False
        self._epoll = select.epoll()  # the background thread's: links once a shot, sockets, the wake-up
        self._doorbells = select.epoll()  # a waiting thread's: links
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        # Both epolls watch the same bells, and who is woken first empties them: the background thread then nudges the other.
        self._nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._doorbells.register(self._nudge, select.EPOLLIN)
        self._asleep = False
        self._waking = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.wakeups = 0

    def add(self, member: Member) -> None:
        """Begin to poll ``member``."""
        fd = member.link.arm()
        with self._guard:
            self._members = (*self._members, member)
            if fd is None:
                self._blind += 1
            else:
                self._by_fd[fd] = member
                self._doorbells.register(fd, select.EPOLLIN)
                self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            control = member.link.control
            if control is not None:
                self._handlers[control] = lambda: self._control(member)
                self._epoll.register(control, select.EPOLLIN | select.EPOLLRDHUP)
            self._start()

    def remove(self, member: Member) -> None:
        """Stop polling ``member``; call it before its link is closed. Idempotent."""
        with self._guard:
            if member not in self._members:
                return
            self._members = tuple(m for m in self._members if m is not member)
            self._unarmed.discard(member)
            fds = [fd for fd, owner in self._by_fd.items() if owner is member]
            if not fds:
                self._blind -= 1
            for fd in fds:
                del self._by_fd[fd]
                self._rung.discard(fd)
                self._doorbells.unregister(fd)
                self._epoll.unregister(fd)
            if member.link.control is not None:
                self._forget(member.link.control)

    def watch(self, fd: int, handler: Callable[[], None]) -> None:
        """Call ``handler()`` on the background thread while ``fd`` is readable; it must not block or raise."""
        with self._guard:
            self._handlers[fd] = handler
            self._epoll.register(fd, select.EPOLLIN)
            self._start()

    def unwatch(self, fd: int) -> None:
        """Stop watching ``fd``; call it before the descriptor is closed. Idempotent."""
        with self._guard:
            self._forget(fd)

    def drive(self, deadline: Deadline, done: Callable[[], bool], own: Member | None = None) -> None:
        """Make progress on this thread until ``done()`` or the deadline; the ``drive`` of this transport's futures.

        All links are polled; only ``own``'s, where the answer will come, is kept from ringing meanwhile, and perhaps until
        something is expected there again. Returns early when another thread waits here already: that one, or the background
        thread after it, makes the progress, and the caller sleeps until it is told.
        """
        if not self._role.acquire(False):
            taken = False
            if self._background:
                self._wanted = True
                taken = self._role.acquire(timeout=_TAKEOVER_S)
                self._wanted = False
            if not taken:
                if own is not None:
                    self.attend(own)
                return
        try:
            members = self._members
            quiet = members if own is None else (own,)
            for member in quiet:
                member.disarm()
            idle_ns = spin_end = 0
            idle = 0
            spinning = self._waiting
            pause, clock = os.sched_yield, time.monotonic_ns
            while True:
                busy = False
                for member in members:
                    if member.peek() and member.progress():
                        busy = True
                if busy:
                    if done() or clock() >= deadline.at_ns:
                        return
                    members = self._members
                    spin_end = idle = 0
                    continue
                idle += 1
                if idle < _FIRST_LOOKS:
                    continue
                pause()
                now = clock()
                if spin_end == 0:
                    if done():
                        return
                    idle_ns, spin_end = now, now + spinning.ns
                elif now > spin_end:
                    if done() or now >= deadline.at_ns:
                        return
                    if self._block(deadline.remaining(), quiet):
                        spinning.waited(clock() - idle_ns)
                        spin_end = 0
                    members = self._members
        finally:
            self._driven = True
            self._leave(tuple([member for member in quiet if not (member.link.costly_bell and self._spares(member))]))

    def attend(self, member: Member) -> None:
        """Something is expected of ``member`` now, and perhaps nobody will poll: let its bell ring. Any thread."""
        if member in self._unarmed:
            self._wake_up()

    def close(self) -> None:
        """Stop the background thread and close the descriptors. All members must have been removed."""
        with self._guard:
            if self._stopping:
                return
            with self._waking:
                self._stopping = True
            thread = self._thread
        if thread is not None:
            os.eventfd_write(self._wake, 1)
            if thread is not threading.current_thread():
                thread.join()
        self._epoll.close()
        self._doorbells.close()
        os.close(self._wake)
        os.close(self._nudge)

    def _start(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._run, name=f"verbflow-{self._name}-progress", daemon=True)
            self._thread.start()
        # The tick of its next sleep may differ, and what came before a bell was armed did not ring.
        self._wake_up()

    def _wake_up(self) -> None:
        with self._waking:  # else the descriptor might be closed in between, and be somebody else's
            if not self._stopping:
                os.eventfd_write(self._wake, 1)

    def _forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def _control(self, member: Member) -> None:
        error = member.link.lost()
        if error is not None:
            with self._guard:
                if member in self._members:
                    self._forget(member.link.control or -1)
            member.lost(error)

    def _block(self, seconds: float, quiet: tuple[Member, ...]) -> bool:
        """Sleep until a bell rings or a tick is over, holding the role. True if anything happened."""
        busy = False
        self._asleep = True  # before the bells are armed: see ``_run``
        self._arm(self._members)
        for member in self._members:
            if member.progress(wait=True):
                busy = True
        if not busy:
            events = self._doorbells.poll(min(seconds, _BLIND_TICK_S if self._blind else TICK_S))
            self.wakeups += 1
            for fd, _ in events:
                owner = self._by_fd.get(fd)
                if fd == self._nudge:
                    os.eventfd_read(fd)
                    busy = True
                elif owner is not None:
                    owner.link.acknowledge()
                    self._unarmed.add(owner)
                    busy = True
        self._asleep = False
        for member in quiet:
            member.disarm()
        return busy

    def _spares(self, member: Member) -> bool:
        """Leave the bell of this member, which costs, alone for now?"""
        if member.expects() or member not in self._members:
            return False
        self._unarmed.add(member)
        return True

    def _arm(self, members: tuple[Member, ...]) -> None:
        # Taken off the list first: one that rings as soon as it is armed may be put there again. All look afterwards.
        self._unarmed.difference_update(members)
        for member in members:
            member.link.arm()

    def _leave(self, quiet: tuple[Member, ...]) -> None:
        """Let those ring again that were kept from it, look at them once more, and give the role up."""
        more = False
        try:
            if self._unarmed:
                quiet += self._expecting()
            self._arm(quiet)
            if self._missed:
                self._missed = False  # first: it may be set again meanwhile
                quiet = self._members
            more = _look(quiet)
        finally:
            self._role.release()
        if self._rung:
            self._rearm()
        # What was there before the bell was armed does not ring it; and somebody may expect something since just now.
        if more or self._missed or (self._unarmed and self._expecting()):
            self._wake_up()

    def _expecting(self) -> tuple[Member, ...]:
        """Those whose bell may be silent and should not be."""
        return tuple(member for member in tuple(self._unarmed) if member.expects())

    def _rearm(self) -> None:
        """Bells rang that the background thread could not follow, because we had the role: wait for them again, and look
        once, because their descriptors have been emptied."""
        while self._rung:
            with self._guard:
                while self._rung:
                    fd = self._rung.pop()
                    owner = self._by_fd.get(fd)
                    if owner is not None:
                        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLONESHOT)
                        if owner not in self._unarmed:
                            owner.link.arm()
            more = True
            if self._role.acquire(False):
                more = _look(self._members)
                self._role.release()
            if more or self._missed:
                self._wake_up()

    def _run(self) -> None:
        next_expiry = 0
        while not self._stopping:
            tick = (_BLIND_TICK_S if self._blind else TICK_S) if self._members else -1
            rang = woken = False
            for fd, _ in self._epoll.poll(tick):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler()
                elif fd == self._wake:
                    os.eventfd_read(fd)
                    woken = True
                else:
                    owner = self._by_fd.get(fd)
                    if owner is not None:
                        owner.link.acknowledge()
                        rang = True
                    # After that, because who reads it arms the bell; and before the role is tried, because who has it reads it.
                    self._rung.add(fd)
            if rang and self._asleep:
                os.eventfd_write(self._nudge, 1)
            if self._members:
                self._turn(rang, woken)
                now = time.monotonic_ns()
                if now >= next_expiry:
                    next_expiry = now + int(TICK_S * 1e9)
                    for member in self._members:
                        member.expire(now)

    def _turn(self, rang: bool, woken: bool) -> None:
        """Serve while there is something to do and nobody else would; spin a little after the last thing."""
        if not self._role.acquire(False):
            if not woken:
                return
            self._missed = True  # first, and then tried again: who has the role reads it after giving the role up
            if not self._role.acquire(False):
                return
        self._background = True
        quiet: tuple[Member, ...] = ()
        try:
            if rang:
                self.wakeups += 1
                self._serving.waited(time.monotonic_ns() - self._idle_ns)
            if self._unarmed:
                self._arm(self._expecting() if self._driven else tuple(self._unarmed))
            self._driven = self._missed = False
            busy = rang
            for member in self._members:
                if member.progress(wait=True):
                    busy = True
            if not busy:
                return
            quiet = self._members
            for member in quiet:
                member.disarm()
            pause, clock, spin_ns = os.sched_yield, time.monotonic_ns, self._serving.ns
            self._idle_ns = clock()
            spin_end = self._idle_ns + spin_ns
            idle = 0
            while not self._wanted and not self._stopping:
                busy = False
                for member in self._members:
                    if member.peek() and member.progress():
                        busy = True
                if busy:
                    self._idle_ns = clock()
                    spin_end = self._idle_ns + spin_ns
                    idle = 0
                    continue
                idle += 1
                if idle >= _FIRST_LOOKS:
                    pause()
                    if clock() > spin_end:
                        break
        finally:
            self._background = False
            self._leave(quiet)


def _look(members: tuple[Member, ...]) -> bool:
    """Handle what is there, up to a bound that keeps a busy peer from holding this thread. True if there may be more.

    Called after bells were armed. It waits for who uses a link just now: that one has sent something, perhaps, and found
    the role taken; the answer may be there already, and would not ring."""
    for member in members:
        looks = _LAST_LOOKS
        while member.peek() and member.progress(wait=True):
            looks -= 1
            if not looks:
                return True
    return False
