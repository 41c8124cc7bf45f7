import numpy as np
import pytest
from pydantic import ValidationError
from simulated_plans import PLANS, conditions, make_plan

from hybridep.errors import ConfigError, UserError
from hybridep.sites import is_called
from simulator.conditions import Conditions, LinkChange, LinkFactors, LinkJitter, Straggler, read_trace
from simulator.errors import SimulationError
from simulator.step import simulate_step

EP = make_plan(4, 2, throughput=1e15, sites=[{"name": f"s{dc}"} for dc in range(4)])
"""Nothing but transfers takes time worth the name."""


def test_goodput_stretches_transfers() -> None:
    plain = simulate_step(EP)
    slower = simulate_step(EP, conditions=conditions(goodput=0.8))
    transfers_s = plain.step_s - 2 * (3 * 1e-3 + 2 * 1e-3) / 2
    assert slower.step_s == pytest.approx(plain.step_s + transfers_s * 0.25, rel=0.02)
    np.testing.assert_allclose(slower.link_bytes, plain.link_bytes)


def test_what_varies_can_be_left_out() -> None:
    stays = {"goodput": 0.9, "window": "1 MiB", "streams": 2, "stragglers": [{"worker": "s0", "slowdown": 2}], "seed": 3}
    varies = {"changes": [{"links": "*", "factor": 0.5}], "trace": "rates.csv", "jitter": [{"spread": 0.1, "period": "1 s"}]}
    assert conditions(**stays, **varies, compute_jitter=0.1).settled == conditions(**stays)


@pytest.mark.parametrize("name", ["ep", "part gathered", "pairs"])
def test_nothing_unusual_changes_nothing(name: str) -> None:
    changed = simulate_step(PLANS[name], conditions=conditions(changes=[{"links": "*", "factor": 1.0, "start": "1 ms"}]))
    assert changed.step_s == pytest.approx(simulate_step(PLANS[name]).step_s, rel=1e-9)


def test_a_window_holds_transfers_to_its_size_per_round_trip() -> None:
    far = make_plan(2, latency_s=0.05, sites=[{"name": "a"}, {"name": "b"}])
    plain, held = simulate_step(far), simulate_step(far, conditions=conditions(window="1 KB"))
    sent = sum(held.link_bytes[:4:2]) / 2  # of one site
    # 1 KB per 100 ms: its transfers follow one another, all but the small ones are held.
    assert held.step_s - plain.step_s == pytest.approx(sent / 1e4, rel=0.1)
    assert simulate_step(far, conditions=conditions(window="1 KB", streams=10)).step_s < held.step_s
    assert simulate_step(far, conditions=conditions(window="1 GB")).step_s == pytest.approx(plain.step_s)


def test_links_that_slow_down_in_the_middle() -> None:
    plain = simulate_step(EP)
    half_s = plain.step_s / 2
    change = {"links": "s2 *", "factor": 0.25, "start": f"{half_s} s"}
    late = simulate_step(EP, conditions=conditions(changes=[change]))
    always = simulate_step(EP, conditions=conditions(changes=[{**change, "start": "0 s"}]))
    assert plain.step_s * 1.2 < late.step_s < always.step_s
    # A step that begins half a step into the run has it from its start.
    begun = simulate_step(EP, conditions=conditions(changes=[change]), start_s=half_s)
    assert begun.step_s == pytest.approx(always.step_s, rel=1e-9)


def test_links_of_sites_with_brackets_are_found_by_name() -> None:
    changed = conditions(changes=[{"links": "s[eu] up", "factor": 0.5}])
    np.testing.assert_array_equal(LinkFactors(changed, ["s[eu] up", "s[eu] down", "se up"]).at(0.0), [0.5, 1.0, 0.5])


def test_loads_are_of_what_links_could_carry() -> None:
    """Each link's own capacity over time, so that the busiest is the one that holds the step up."""
    changes = [
        {"links": "s[0-3] up", "factor": 4},
        {"links": "s1 down", "factor": 0.5, "start": "1 ms", "end": "3 ms"},
        {"links": "s1 down", "factor": 0.25, "start": "3 ms"},
    ]
    result = simulate_step(EP, conditions=conditions(changes=changes, goodput=0.8))
    rate = 0.8 * 1e9 / 8
    loads = {link.name: link for link in result.links}
    assert loads["s0 up"].load == pytest.approx(loads["s0 up"].size_bytes / (4 * rate * result.step_s), rel=1e-12)
    carried = rate * (1e-3 + 2e-3 * 0.5 + (result.step_s - 3e-3) * 0.25)
    assert loads["s1 down"].load == pytest.approx(loads["s1 down"].size_bytes / carried, rel=1e-12)
    assert result.busiest_link.name == "s1 down" and 0.8 < result.busiest_link.load <= 1


def test_a_cut_holds_the_step_up_for_as_long_as_it_lasts() -> None:
    plain = simulate_step(EP)
    cut = {"links": "s1 up", "factor": 0.0, "start": f"{plain.step_s / 2} s", "end": f"{plain.step_s / 2 + 3} s"}
    assert simulate_step(EP, conditions=conditions(changes=[cut])).step_s == pytest.approx(plain.step_s + 3, rel=0.1)
    with pytest.raises(SimulationError, match="cut link"):
        simulate_step(EP, conditions=conditions(changes=[{"links": "s1 up", "factor": 0.0}]))


def test_links_that_jitter_do_not_mend_those_that_are_cut() -> None:
    jitter = [{"links": "s0 *", "spread": 0.1, "period": "1 ms"}]
    cut = {"links": "s1 up", "factor": 0.0, "start": "0 s"}
    mends = conditions(jitter=jitter, changes=[{**cut, "end": "0.2 s"}])
    assert 0.2 < simulate_step(EP, conditions=mends).step_s < 0.4
    with pytest.raises(SimulationError, match=r"cut link: s1 up \(links 's1 up' have factor 0 from 0"):
        simulate_step(EP, conditions=conditions(jitter=jitter, changes=[cut]))


def test_alike_sites_stay_merged_where_nothing_tells_them_apart() -> None:
    plan = make_plan(8, 2, sites=[{"name": f"s{dc}"} for dc in range(8)])
    whole = simulate_step(plan)
    one = simulate_step(plan, conditions=conditions(changes=[{"links": "s3 down", "factor": 0.5}]))
    assert whole.symmetry.num_kinds < one.symmetry.num_kinds < plan.cluster.num_gpus
    # The same written as a cluster.
    written = make_plan(8, 2, sites=[{"name": f"s{dc}"} | ({"down": "0.5 Gbps"} if dc == 3 else {}) for dc in range(8)])
    assert one.step_s == pytest.approx(simulate_step(written).step_s, rel=1e-9)


def test_stragglers_slow_their_steps_down() -> None:
    plan = make_plan(2, 2, throughput=1e9, sites=[{"name": "a"}, {"name": "b"}])
    plain = simulate_step(plan)
    slow = conditions(stragglers=[{"worker": "b/gpu1", "slowdown": 3, "end": "1 min"}])
    parts = simulate_step(plan, conditions=slow).parts
    assert parts["expert"] == pytest.approx(3 * plain.parts["expert"], rel=0.05)
    assert simulate_step(plan, conditions=slow, start_s=60.0).step_s == pytest.approx(plain.step_s)
    slow.require(plan.cluster)
    with pytest.raises(UserError, match="no worker 'c'"):
        conditions(stragglers=[{"worker": "c", "slowdown": 2}]).require(plan.cluster)


def test_jitter_is_seeded() -> None:
    def times(seed: int) -> list[float]:
        both = conditions(compute_jitter=0.2, jitter=[{"links": "s*", "spread": 0.3, "period": "20 ms"}], seed=seed)
        return [simulate_step(EP, conditions=both, start_s=start_s).step_s for start_s in (0.0, 1.0)]

    assert times(1) == times(1)
    assert len({*times(1), *times(2)}) == 4
    assert min(times(1)) > simulate_step(EP).step_s
    # Every rank draws its own.
    assert simulate_step(EP, conditions=conditions(compute_jitter=0.2)).symmetry.num_kinds == EP.cluster.num_gpus


def test_a_link_draws_the_same_whatever_other_links_there_are() -> None:
    """A site is lost, and the others' links go on as they would have; the draws are normal, and no two alike."""
    names = [f"s{site} {way}" for site in range(200) for way in ("up", "down")]
    jitter = Conditions(jitter=(LinkJitter(spread=0.5, period="0.1 s"),), seed=3)
    every, few = LinkFactors(jitter, names), LinkFactors(jitter, names[10:])
    drawn = np.array([every.at(now_s) for now_s in np.arange(50) * 0.1])
    assert all(few.at(now_s).tolist() == drawn[at, 10:].tolist() for at, now_s in enumerate(np.arange(50) * 0.1))
    assert len(np.unique(drawn)) == drawn.size
    below = [float((-np.log(drawn) / 0.5 < point).mean()) for point in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(below, (0.3829, 0.6827, 0.9545), atol=0.012)
    links = drawn[:, 0] - drawn[:, 0].mean(), drawn[:, 1] - drawn[:, 1].mean()
    assert abs((links[0] * links[1]).mean()) < 0.3 * links[0].std() * links[1].std()


def test_factors_over_time() -> None:
    names = ["a up", "a down", "b up", "b down"]
    both = Conditions(
        goodput=0.5,
        changes=(
            LinkChange(links="a *", factor=0.5, start="10 s", end="20 s"),
            LinkChange(links="* up", factor=0.1, start="15 s"),
        ),
    )
    factors = LinkFactors(both, names)
    assert factors.at(0.0).tolist() == [0.5, 0.5, 0.5, 0.5]
    np.testing.assert_allclose(factors.at(15.0), [0.025, 0.25, 0.05, 0.5])
    np.testing.assert_allclose(factors.at(20.0), [0.05, 0.5, 0.05, 0.5])
    assert [factors.next_s(now_s) for now_s in (0.0, 10.0, 15.0, 20.0)] == [10.0, 15.0, 20.0, float("inf")]
    assert len(set(factors.traits.tolist())) == 4
    periods = LinkFactors(Conditions(jitter=(LinkJitter(spread=0.5, period="0.1 s"),)), names)
    now_s, seen = 0.0, []
    for _ in range(50):
        seen.append(tuple(periods.at(now_s)))
        now_s = periods.next_s(now_s)
    assert now_s == pytest.approx(5.0) and len(set(seen)) == 50
    fine = LinkFactors(Conditions(jitter=(LinkJitter(spread=0.5, period="0.5 ms"),)), names)
    next_s = fine.next_s(32768.0045)
    assert 32768.0045 <= next_s < fine.next_s(next_s) and fine.at(next_s).tolist() != fine.at(fine.next_s(next_s)).tolist()


def test_links_of_a_long_trace_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def called(name: str, pattern: str) -> bool:
        looked_up.append((name, pattern))
        return is_called(name, pattern)

    monkeypatch.setattr("simulator.conditions.is_called", called)
    rows = tuple(LinkChange(links=f"s{row % 2} up", factor=0.5, start=f"{row} s") for row in range(100))
    links = [link.name for link in EP.cluster.link_table]
    varied = Conditions(changes=rows)
    varied.require(EP.cluster)
    assert len(looked_up) == 2 * len(links)
    factors = LinkFactors(varied, links)
    assert len(looked_up) == 4 * len(links) and len(set(factors.traits.tolist())) == 3


def test_a_trace_holds_each_row_until_the_next_of_its_links(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "trace.csv"
    path.write_text("seconds,links,factor\n0,a up,1\n5,a up,0.5\n6,b up,0.25\n9,a up,1\n")
    factors = LinkFactors(Conditions(trace=path), ["a up", "b up"])
    assert [factors.at(now_s).tolist() for now_s in (4.0, 5.0, 6.0, 9.0)] == [[1, 1], [0.5, 1], [0.5, 0.25], [1, 0.25]]
    path.write_text("seconds,factor,links\n0,1,a up\n5,0.5\n")
    with pytest.raises(ConfigError, match=r"trace\.csv:3: seconds,links,factor"):
        read_trace(path)
    path.write_text("seconds,links,factor\n5,a up,1\n2,a up,0.5\n")
    with pytest.raises(ConfigError, match=r"trace\.csv:3"):
        read_trace(path)
    with pytest.raises(UserError, match="changes: no link is named 'c up'"):
        Conditions(changes=(LinkChange(links="c up", factor=1),)).require(EP.cluster)
    path.write_text("seconds,links,factor\n5,c up,1\n")
    with pytest.raises(UserError, match=r"trace .*trace\.csv: no link is named 'c up'"):
        Conditions(trace=path).require(EP.cluster)
    with pytest.raises(ValidationError, match="not after start"):
        LinkChange(links="*", factor=1, start="2 s", end="1 s")
    with pytest.raises(ValidationError):
        Straggler(worker="a", slowdown=0.5)
    with pytest.raises(ValidationError, match="not after start"):
        Straggler(worker="a", slowdown=2, start="2 s", end="1 s")
