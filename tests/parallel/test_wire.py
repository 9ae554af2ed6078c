"""Plans and results arrive at a rank as they were sent."""

import msgspec
import numpy as np
import pytest

from graftlm.contracts import BlockCopy, StepCopies
from graftlm.errors import InvariantError
from graftlm.parallel.wire import PlanDecoder, decode_result, encode_plan, encode_result
from graftlm.plan import (
    LateMask,
    LogprobTable,
    MediaWork,
    PoolSpan,
    PromptLogprobSpan,
    RowSetup,
    StepPlan,
    StepResult,
    WindowTables,
)
from graftlm.pooling.pooling import LAST, Pooling
from graftlm.types import SamplingParams


def int32(*values):
    return np.array(values, dtype=np.int32)


def int64(*values):
    return np.array(values, dtype=np.int64)


def plan(**fields):
    return StepPlan(
        **{
            "step_id": 7,
            "rows": int32(3, 1),
            "query_lens": int32(1, 2),
            "seq_lens": int32(9, 2),
            "page_table": np.arange(12, dtype=np.int32).reshape(2, 6)[:, :3],  # not contiguous
            "input_ids": int64(5, 6, 7),
            "device_idx": int64(0),
            "positions": int64(8, 0, 1),
            "out_slots": int64(30, 31, 32),
            "num_decodes": 1,
            "sample_idx": int64(0, 1),
            "sample_positions": int64(9, 2),
        }
        | fields
    )


SETUP = RowSetup(
    1, "a#0", SamplingParams(temperature=0.5, logit_bias={3: 1.5}, logits_processors={"p": {"x": [1]}}, n=2), 2**63,
    int32(1, 2), int32(), (4,),
)  # fmt: skip
PLANS = {
    "plain": {},
    "empty": {"rows": int32(), "page_table": np.zeros((0, 3), dtype=np.int32), "sample_idx": int64()},
    "setups": {"setups": (SETUP,)},
    "prompt spans": {"prompt_spans": (PromptLogprobSpan(1, 1, int64(7, 8), 2, (3,)),)},
    "pool spans": {"pool_spans": (PoolSpan(1, LAST, 0, 2, True), PoolSpan(0, Pooling("labels", (1, 2)), 0, 1, False))},
    "mask": {"token_mask": LateMask(int64(0))},
    "window": {"window": WindowTables(np.ones((2, 3), dtype=np.int32), int64(1, 2, 3))},
    "copies": {"copies": StepCopies(loads=(BlockCopy(2, 1, int32(4, 5)),), stores=(BlockCopy(0, 0, int32(6)),))},
    "adapters": {"adapter_slots": int32(0, 2)},
    "next tokens": {"next_ids": int64(0, 7)},
    "drafts": {"num_drafts": int32(0, 1)},
}


def plain(value):
    """Return a value as data that == compares."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, LateMask):
        return plain(value.idx)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, StepPlan | StepResult):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, SamplingParams | Pooling):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_arrives_unchanged(name):
    sent = plan(**PLANS[name])
    found = PlanDecoder().decode(encode_plan(sent))
    assert plain(found) == plain(sent)
    assert all(array.flags.writeable for array in (found.input_ids, found.page_table, found.positions))


def test_equal_rows_are_the_same_array():
    decoder = PlanDecoder()
    first, second, third = (
        decoder.decode(encode_plan(plan(rows=rows))) for rows in (int32(3, 1), int32(3, 1), int32(3, 2))
    )
    assert first.rows is second.rows
    assert third.rows.tolist() == [3, 2]


TABLE = LogprobTable(
    np.array([-1.5], dtype=np.float32), np.array([[3]], dtype=np.int32), np.array([[-0.5]], dtype=np.float32)
)
WIDE = LogprobTable(TABLE.token_logprobs, TABLE.top_ids, TABLE.top_logprobs, np.array([[-2.5]], dtype=np.float32))


@pytest.mark.parametrize(
    "result",
    [
        StepResult(int64(4, 5), {}, None, (), 0.25),
        StepResult(int32(4), {0: "logits are not finite"}, TABLE, (WIDE, TABLE), 0.25),
        StepResult(int32(), {}, None, (), 0.25, (np.array([0.5, 1.5], dtype=np.float32),)),
    ],
)
def test_a_result_arrives_unchanged(result):
    step_id, found = decode_result(encode_result(9, result))
    assert step_id == 9
    assert plain(found) == plain(result)


def test_what_ranks_do_not_support_is_refused():
    with pytest.raises(InvariantError, match="which ranks do not support"):
        encode_plan(plan(media_work=MediaWork((), (), 1.0)))


def test_a_plan_of_another_form_is_refused():
    header, arrays = encode_plan(plan())
    with pytest.raises(msgspec.ValidationError):
        PlanDecoder().decode([msgspec.msgpack.encode(["a", 1]), arrays])
    with pytest.raises(ValueError, match="buffer"):
        PlanDecoder().decode([header, arrays[:-8]])
