import threading

import pytest

from harness.bench.group import Group, GroupError
from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError


def together(tmp_path, size, part, host=""):
    """Run ``part(group)`` at every rank on a thread; the answers or errors by rank."""
    answers = [None] * size

    def rank_thread(rank):
        group = None
        try:
            group = Group(rank, size, tmp_path, "secret", Deadline.after(20), host)
            answers[rank] = part(group)
        except Exception as error:
            answers[rank] = error
        finally:
            if group is not None:
                group.close()

    threads = [threading.Thread(target=rank_thread, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_ranks_exchange_values_in_rank_order(tmp_path, host):
    def part(group):
        group.barrier()
        return (
            group.exchange(group.rank * 10),
            group.broadcast(f"from {group.rank}", 2),
            group.exchange_bytes(bytes([group.rank])),
        )

    for answer in together(tmp_path, 3, part, host):
        assert answer == ([0, 10, 20], "from 2", [b"\0", b"\1", b"\2"])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_failure_reaches_every_rank_with_its_reason(tmp_path, failing):
    def part(group):
        if group.rank == failing:
            group.abort("out of luck")
            return
        group.barrier()
        return

    answers = together(tmp_path, 3, part)
    for rank in {0, 1, 2} - {failing}:
        assert isinstance(answers[rank], GroupError)
        assert "out of luck" in str(answers[rank])


def test_a_rank_that_vanishes_is_named(tmp_path):
    def part(group):
        if group.rank == 1:
            group.close()
            return
        group.barrier()
        return

    answers = together(tmp_path, 3, part)
    assert isinstance(answers[0], GroupError)
    assert "rank 1" in str(answers[0])
    assert isinstance(answers[2], GroupError)


def test_waiting_for_a_rank_that_never_comes_ends_at_the_deadline(tmp_path):
    with pytest.raises(PeerLostError, match="rank 1 to join"):
        Group(0, 2, tmp_path, "secret", Deadline.after(0.2))


def test_a_stranger_without_the_token_is_not_let_in(tmp_path):
    outcome = {}

    def stranger():
        try:
            Group(1, 2, tmp_path, "wrong", Deadline.after(2))
        except Exception as error:
            outcome["stranger"] = error

    thread = threading.Thread(target=stranger)
    thread.start()
    with pytest.raises(PeerLostError):
        Group(0, 2, tmp_path, "secret", Deadline.after(1))
    thread.join()
    assert isinstance(outcome["stranger"], PeerLostError)


def test_a_group_of_one_needs_nobody(tmp_path):
    group = Group(0, 1, tmp_path, "", Deadline.after(1))
    assert group.exchange("me") == ["me"]
    with pytest.raises(ConfigError):
        Group(2, 2, tmp_path, "", Deadline.after(1))
