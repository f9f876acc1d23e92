"""The dispatch benchmark: contenders take turns, and ratios pair what was measured in one round."""

from harness.bench.dispatch_peers import Comparison, compare, compare_chain, compare_run, lines


def test_contenders_take_turns_after_one_call_to_warm_up():
    order = []
    contenders = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    comparison = compare("two", contenders, rounds=2)
    assert order[:2] == ["a", "b"]
    runs = [name for at, name in enumerate(order) if at == 0 or order[at - 1] != name]
    assert runs == ["a", "b", "a", "b", "a", "b"]
    assert all(len(times) == 2 for times in comparison.rounds.values())


def test_ratios_pair_rounds():
    comparison = Comparison("drift", {"own": [10, 100, 1000], "other": [20, 200, 4000]})
    assert comparison.ratio("own", "other") == 0.5
    assert comparison.median("own") == 100
    assert lines(comparison, 10)[1].split() == ["own", "0.1", "us", "10", "ns", "an", "op", "0.50x", "other"]


def test_the_chain_and_the_single_run_are_measured():
    chain = compare_chain(length=10, rounds=1)
    assert {"bare", "verbflow"} <= set(chain.rounds)
    single = compare_run(rounds=1)
    assert "verbflow" in single.rounds
    assert all(time > 0 for each in (chain, single) for times in each.rounds.values() for time in times)
