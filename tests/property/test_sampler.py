"""Laws of the sampler: who computes a sample may change, what forms a step may not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from loft_hvd.balance.plan import scale_sizes
from loft_hvd.data.assign import Ints, assign, count_local, strata_caps
from loft_hvd.data.draws import Draw, EpochSettings, count_steps, epoch_order
from loft_hvd.data.placement import Placement
from loft_hvd.data.sampler import GlobalBatches
from tests.support.placements import placements, sizes_of
from tests.support.plans import FakePlans

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what}:UserWarning")
    for what in ("the last batch of the epoch", "an epoch has no step")
]
# No deadline: the machine that runs the tests may be busy, and a law has no speed.
laws = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=60
)


@dataclass
class Case:
    placement: Placement
    plans: FakePlans
    seed: int
    epoch: int
    drop_last: bool
    relaxed: bool = False
    shuffle: bool = True
    costs: Ints | None = None  # of the samples, where owners go by these

    def batches(self) -> GlobalBatches:
        options = EpochSettings(
            self.placement,
            self.shuffle or self.relaxed,
            self.seed,
            self.drop_last,
            self.relaxed,
        )
        batches = GlobalBatches(options, self.plans, costs=self.costs)
        batches.set_epoch(self.epoch)
        return batches

    def draws(self) -> list[Draw]:
        return list(self.batches().start(first_step=0)[1])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(1, 8))
    num_samples = draw(st.integers(0, 1000))
    global_batch_size = draw(st.integers(world_size, 96))
    sizes = sizes_of(world_size, total=global_batch_size)
    later = draw(st.dictionaries(st.integers(1, 30), sizes, max_size=6))
    min_ranks = draw(st.integers(1, world_size))
    plans = FakePlans(draw(sizes), min_ranks=min_ranks, later=later)
    costs = None
    if draw(st.booleans(), label="by cost"):
        spread = draw(st.sampled_from([1, 3, 1000, 2**31]))
        seed = draw(st.integers(0, 99))
        costs = np.random.default_rng(seed).integers(1, spread + 1, num_samples)
        if draw(st.booleans(), label="micro-batches"):
            most = -(-global_batch_size // 16)
            caps = st.lists(st.integers(most, 96), min_size=world_size, max_size=world_size)
            plans.caps, plans.num_micro = draw(caps), draw(st.integers(1, 16))
    return Case(
        placement=draw(placements(num_samples, world_size)),
        plans=plans,
        costs=costs,
        seed=draw(st.integers(0, 2**40)),
        epoch=draw(st.integers(0, 5)),
        drop_last=draw(st.booleans()),
        relaxed=draw(st.booleans()),
        shuffle=draw(st.booleans()),
    )


def samples_of(draws: list[Draw]) -> list[int]:
    return [int(index) for draw in draws for index in draw.batch]


@laws
@given(case=cases())
def test_every_sample_is_computed_exactly_once(case: Case) -> None:
    computed: list[int] = []
    world_size = case.plans.world_size
    batches = case.batches()
    for draw in batches.start(first_step=0)[1]:
        sizes = draw.step_sizes.sizes
        for rank in range(world_size):
            indices = draw.indices(rank, dummy_size=2, homes=batches.homes)
            if sizes[rank]:
                assert len(indices) == sizes[rank]
                computed += indices
            else:
                assert set(indices) <= set(draw.batch.tolist())
                assert len(indices) == min(2, len(draw.batch))
    assert len(computed) == len(set(computed))
    tail = len(case.placement) % case.plans.global_batch_size
    is_left_out = case.drop_last or tail < case.plans.min_ranks
    assert len(computed) == len(case.placement) - (tail if is_left_out else 0)


@laws
@given(case=cases(), data=st.data())
def test_global_batches_do_not_depend_on_the_plans(case: Case, data: st.DataObject) -> None:
    before = case.draws()
    sizes = sizes_of(case.plans.world_size, total=case.plans.global_batch_size)
    case.plans.later = data.draw(st.dictionaries(st.integers(0, 30), sizes, max_size=6))
    after = case.draws()
    assert [draw.batch.tolist() for draw in after] == [draw.batch.tolist() for draw in before]
    case.costs = None
    plain = case.draws()
    assert [draw.batch.tolist() for draw in after] == [draw.batch.tolist() for draw in plain]


@laws
@given(case=cases())
def test_every_rank_makes_the_counted_steps_and_enough_ranks_work(case: Case) -> None:
    draws = case.draws()
    num_steps = count_steps(len(case.placement), case.plans, drop_last=case.drop_last)
    assert [draw.step_sizes.step for draw in draws] == list(range(num_steps))
    for draw in draws:
        owned = np.bincount(draw.assignment.owners, minlength=case.plans.world_size)
        assert tuple(owned) == draw.step_sizes.sizes
        assert sum(size > 0 for size in draw.step_sizes.sizes) >= case.plans.min_ranks
        if case.costs is not None:
            shares = scale_sizes(
                draw.step_sizes.shares, len(draw.batch), min_ranks=case.plans.min_ranks
            )
            assert shares == draw.step_sizes.shares
            pairs = zip(draw.step_sizes.sizes, shares, strict=True)
            assert all((size > 0) == (share > 0) for size, share in pairs)
        for rank, cap in enumerate(case.plans.caps):
            micro = draw.step_sizes.micro_sizes(rank)
            assert sum(micro) == draw.step_sizes.sizes[rank]
            assert cap is not None
            assert max(micro) <= cap
            assert len(micro) <= 16
            assert min(micro) > 0 or micro == (0,)


@laws
@given(case=cases(), data=st.data())
def test_resuming_with_any_world_finishes_the_epoch_exactly_once(
    case: Case, data: st.DataObject
) -> None:
    case.plans.min_ranks = 1
    case.drop_last = False
    expected = samples_of(case.draws())
    done: list[int] = []
    state = case.batches().state_dict(position=0, step=0)
    for _ in range(3):
        batches = case.batches()
        step = batches.load_state_dict(state).step
        position, draws = batches.start(first_step=step)
        for draw in draws:
            if data.draw(st.booleans(), label="stop here"):
                break
            done += draw.batch.tolist()
            step, position = step + 1, draw.position
        state = batches.state_dict(position=position, step=step)
        world_size = data.draw(st.integers(1, 8), label="next world")
        case.placement = data.draw(placements(len(case.placement), world_size))
        case.plans = FakePlans(
            data.draw(sizes_of(world_size, total=data.draw(st.integers(world_size, 96))))
        )
        if case.costs is not None:  # a run may go on with other costs, or without
            case.costs = data.draw(st.sampled_from([None, case.costs[::-1].copy()]))
    batches = case.batches()
    done += samples_of(list(batches.start(first_step=batches.load_state_dict(state).step)[1]))
    assert sorted(done) == sorted(expected)
    if not case.relaxed:
        assert done == expected


# A global batch that changes with each plan.


def any_sizes(world_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes of any sum that gives every rank a sample on average."""
    return st.integers(world_size, 96).flatmap(lambda total: sizes_of(world_size, total=total))


def change_batches(case: Case, data: st.DataObject) -> None:
    """Draw the global batch of each plan anew."""
    sizes = any_sizes(case.plans.world_size)
    case.plans.later = data.draw(st.dictionaries(st.integers(1, 30), sizes, max_size=12))


@laws
@given(case=cases(), data=st.data())
def test_every_sample_comes_once_whatever_global_batches_plans_have(
    case: Case, data: st.DataObject
) -> None:
    change_batches(case, data)
    draws, batches = case.draws(), case.batches()
    computed: list[int] = []
    for step, draw in enumerate(draws):
        sizes = draw.step_sizes.sizes
        assert draw.step_sizes.step == step
        assert sum(size > 0 for size in sizes) >= case.plans.min_ranks
        for rank in range(case.plans.world_size):
            indices = draw.indices(rank, dummy_size=2, homes=batches.homes)
            computed += indices if sizes[rank] else []
        plan = case.plans.plan_at(step)
        is_last = step == len(draws) - 1 and not case.drop_last
        assert sum(sizes) == plan.global_batch_size or (
            is_last and sum(sizes) < plan.global_batch_size
        )
    assert len(computed) == len(set(computed))
    num_left = len(case.placement) - len(computed)
    after = case.plans.plan_at(len(draws)).global_batch_size
    assert num_left < (after if case.drop_last else case.plans.min_ranks)


@laws
@given(case=cases(), data=st.data())
def test_global_batches_depend_on_the_plans_sums_alone(case: Case, data: st.DataObject) -> None:
    change_batches(case, data)
    before = case.draws()
    case.plans.later = {
        at: data.draw(sizes_of(case.plans.world_size, total=sum(sizes)))
        for at, sizes in case.plans.later.items()
    }
    after = case.draws()
    assert [draw.batch.tolist() for draw in after] == [draw.batch.tolist() for draw in before]


@laws
@given(case=cases(), data=st.data())
def test_resuming_with_any_world_and_global_batches_finishes_the_epoch_exactly_once(
    case: Case, data: st.DataObject
) -> None:
    case.plans.min_ranks, case.drop_last = 1, False
    num_samples, expected = len(case.placement), samples_of(case.draws())
    done: list[int] = []
    state = case.batches().state_dict(position=0, step=0)
    for stops in (True, True, True, False):
        change_batches(case, data)
        batches = case.batches()
        step = batches.load_state_dict(state).step
        position, draws = batches.start(first_step=step)
        for draw in draws:
            if stops and data.draw(st.booleans(), label="stop here"):
                break
            done += draw.batch.tolist()
            step, position = step + 1, draw.position
        state = batches.state_dict(position=position, step=step)
        world_size = data.draw(st.integers(1, 8), label="next world")
        case.placement = data.draw(placements(num_samples, world_size))
        case.plans = FakePlans(data.draw(any_sizes(world_size)))
    assert sorted(done) == sorted(expected)
    if not case.relaxed:
        assert done == expected


def drawn_sizes(world_size: int, random: np.random.Generator) -> list[int]:
    """Return sizes of any global batch of up to 96 samples."""
    total = int(random.integers(world_size, 97))
    return [int(size) for size in random.multinomial(total, [1 / world_size] * world_size)]


@pytest.mark.long
@pytest.mark.parametrize("relaxed", [False, True])
def test_300_epochs_and_200_restarts_with_changing_global_batches_lose_no_sample(
    relaxed: bool,
) -> None:
    random = np.random.default_rng(7)
    num_samples, step, num_restarts = 700, 0, 0
    for epoch in range(300):
        done: list[int] = []
        world_size, state = 4, None
        while state is None or state["position"] < num_samples:
            plans = FakePlans(drawn_sizes(world_size, random))
            starts = step + random.integers(1, 30, size=4)  # of an interval each
            plans.later = {int(at): drawn_sizes(world_size, random) for at in starts}
            placement = Placement.sharded(num_samples, world_size)
            batches = Case(placement, plans, 3, epoch, False, relaxed).batches()
            if state is not None:
                step = batches.load_state_dict(state).step
            position, draws = batches.start(first_step=step)
            stops_after = random.integers(1, 12) if num_restarts < 200 else num_samples
            for count, draw in enumerate(draws):
                if count == stops_after:
                    num_restarts += 1
                    world_size = int(random.integers(1, 9))
                    break
                assert draw.step_sizes.step == step
                assert draw.step_sizes.total == len(draw.batch)
                done += draw.batch.tolist()
                step, position = step + 1, draw.position
            state = batches.state_dict(position=position, step=step)
        assert sorted(done) == list(range(num_samples)), epoch
    assert num_restarts == 200


@st.composite
def steps(draw: st.DrawFn) -> tuple[Placement, Ints, Ints]:
    world_size = draw(st.integers(1, 8))
    num_samples = draw(st.integers(1, 200))
    placement = draw(placements(num_samples, world_size))
    batch_size = draw(st.integers(1, min(num_samples, 64)))
    order = epoch_order(num_samples, seed=draw(st.integers(0, 99)), epoch=0)
    return placement, order[:batch_size], np.array(draw(sizes_of(world_size, total=batch_size)))


def overlapping_step(seed: int) -> tuple[Placement, Ints, Ints]:
    """A step whose samples have homes that overlap and neither nest nor keep apart."""
    rng = np.random.default_rng(seed)
    world_size = int(rng.integers(3, 9))
    width = int(rng.integers(2, 4))
    sets = [rng.choice(world_size, width, replace=False).tolist() for _ in range(world_size)]
    choice = rng.integers(0, world_size, 60)
    placement = Placement.from_function(lambda i: sets[choice[i]], 60)
    batch_size = int(rng.integers(4, 40))
    sizes = rng.multinomial(batch_size, rng.dirichlet(np.ones(world_size)))
    return placement, rng.permutation(60)[:batch_size], sizes


def assert_local_reads_are_optimal(placement: Placement, batch: Ints, sizes: Ints) -> None:
    homes = placement.at(len(sizes))
    assignment = assign(batch, sizes, homes)
    slots = np.repeat(np.arange(len(sizes)), sizes)  # one column for each place of a rank
    hits = homes.local.holders[homes.rows[batch]][:, slots]
    rows, columns = linear_sum_assignment(hits, maximize=True)
    assert assignment.local.sum() == hits[rows, columns].sum()
    assert (np.bincount(assignment.owners, minlength=len(sizes)) == sizes).all()


@laws
@given(step=steps())
def test_local_reads_are_the_optimum_that_the_sizes_allow(
    step: tuple[Placement, Ints, Ints],
) -> None:
    assert_local_reads_are_optimal(*step)


@pytest.mark.parametrize("seed", range(40))
def test_local_reads_are_the_optimum_where_homes_overlap(seed: int) -> None:
    assert_local_reads_are_optimal(*overlapping_step(seed))


@laws
@given(step=steps())
def test_counting_agrees_with_assigning(
    step: tuple[Placement, Ints, Ints],
) -> None:
    placement, batch, sizes = step
    homes = placement.at(len(sizes))
    counts = np.bincount(homes.rows[batch], minlength=len(homes.local.holders))
    local = count_local(np.stack([counts, counts]), sizes, homes)
    expected = assign(batch, sizes, homes).local
    assert (local == expected).all()


def optimum_under_caps(hits: npt.NDArray[np.bool_], strata: Ints, sizes: Ints, caps: Ints) -> int:
    """Most local reads by linear programming: its matrix is totally unimodular."""
    num_samples, world_size = hits.shape
    equal, below, limits = [], [], []
    for sample in range(num_samples):
        row = np.zeros((num_samples, world_size))
        row[sample] = 1
        equal.append(row.ravel())
    for rank in range(world_size):
        row = np.zeros((num_samples, world_size))
        row[:, rank] = 1
        below.append(row.ravel())
        limits.append(sizes[rank])
        for stratum in range(len(caps)):
            row = np.zeros((num_samples, world_size))
            row[strata == stratum, rank] = 1
            below.append(row.ravel())
            limits.append(caps[stratum, rank])
    found = linprog(
        -hits.ravel().astype(float),
        A_ub=np.array(below),
        b_ub=np.array(limits),
        A_eq=np.array(equal),
        b_eq=np.ones(num_samples),
        bounds=(0, 1),
    )
    assert found.success
    return round(-float(found.fun))


def assert_caps_hold_at_the_optimum(
    placement: Placement, batch: Ints, sizes: Ints, *, num_strata: int, cap: float
) -> None:
    labels = np.arange(len(placement)) * num_strata // len(placement)  # sorted by class
    placement = placement.with_strata(labels, cap=cap)
    homes = placement.at(len(sizes))
    assignment = assign(batch, sizes, homes)
    strata = labels[batch]
    counts = np.bincount(strata, minlength=num_strata)
    caps = strata_caps(counts, sizes, placement.strata_cap)
    taken = np.zeros((num_strata, len(sizes)), int)
    np.add.at(taken, (strata, assignment.owners), 1)
    assert (taken <= caps).all()
    assert (np.bincount(assignment.owners, minlength=len(sizes)) == sizes).all()
    hits = homes.local.holders[homes.rows[batch]]
    assert assignment.local.sum() == optimum_under_caps(hits, strata, sizes, caps)


@laws
@given(step=steps(), num_strata=st.integers(1, 6), cap=st.sampled_from([1, 1.25, 1.5, 2, 100]))
def test_caps_on_strata_hold_at_the_least_cost_in_local_reads(
    step: tuple[Placement, Ints, Ints], num_strata: int, cap: float
) -> None:
    assert_caps_hold_at_the_optimum(*step, num_strata=num_strata, cap=cap)


@pytest.mark.parametrize("cap", [1, 1.25])
@pytest.mark.parametrize("seed", range(40))
def test_caps_on_strata_hold_where_homes_overlap(seed: int, cap: float) -> None:
    assert_caps_hold_at_the_optimum(*overlapping_step(seed), num_strata=1 + seed % 6, cap=cap)


@laws
@given(
    world_size=st.integers(2, 8),
    num_steps=st.integers(2, 20),
    share=st.integers(2, 12),
    data=st.data(),
)
def test_relaxed_order_has_the_most_local_reads_that_an_epoch_allows(
    world_size: int, num_steps: int, share: int, data: st.DataObject
) -> None:
    sizes = data.draw(sizes_of(world_size, total=share * world_size))
    placement = Placement.sharded(num_steps * share * world_size, world_size)
    case = Case(placement, FakePlans(sizes), seed=0, epoch=0, drop_last=False, relaxed=True)
    draws = case.draws()
    for draw in draws:
        held = np.bincount(placement.groups[draw.batch], minlength=world_size)
        assert np.abs(held - share).max() <= 1, "every batch holds every shard in proportion"
    local = sum(draw.assignment.local.sum() for draw in draws)
    most = num_steps * sum(min(size, share) for size in sizes)
    # each step may miss one sample of a shard, which comes one step sooner or later
    assert most - num_steps * world_size <= local <= most
