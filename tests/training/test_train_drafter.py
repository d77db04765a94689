"""Whole tuning runs: the adapter is written, is what peft makes of it, and bad input is told in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import specrag
from specrag.cli import main as frame
from specrag.engine.outputs import LOGITS
from specrag.engine.passes import Segment, SessionModel
from specrag.engine.processors import Logits
from specrag.errors import InputError, ModelFilesError
from specrag.models import adapters, catalog
from specrag.models.adapters import find_adapter, merge_adapter
from specrag.models.catalog import ModelFiles
from specrag.models.decoder import LeanDecoder
from specrag.models.loading import load_model
from specrag.models.tokenizer import Tokenizer
from specrag.models.weights import read_config, read_weights
from specrag.training.drafter.examples import Example, ExampleEncoder, make_batch, parts, plan
from specrag.training.drafter.measure import count_drafts
from specrag.training.drafter.objective import Drafted, DrafterObjective, DrafterProgress
from specrag.training.drafter.rows import read_rows
from specrag.training.drafter.run import ADAPTER_RATE, FULL_RATE, Outcome, TuningSettings
from specrag.training.drafter.train import train_drafter
from specrag.training.loop import learning_rate
from specrag.training.run import Status
from tests.sample import build_sample
from tests.training.tiny_drafter import (
    CPU,
    TINY,
    drafter_run,
    loop_in,
    row,
    tiny_tuned,
    to_the_end,
    write_rows,
)

# peft asks the model under a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

SMALL = TuningSettings(
    held_back=2, rank=4, epochs=3, batch_rows=3, learning_rate=5e-3, evaluations=1, drafts=1, precision="fp32"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of five questions."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", [row(number) for number in range(5)])


@pytest.fixture(scope="module")
def smollm2_files(smollm2: Path) -> ModelFiles:
    """SmolLM2-135M-Instruct."""
    return catalog.resolve("smollm2-135m")


@pytest.fixture(scope="module")
def done(smollm2: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """SmolLM2 tuned for three steps on three rows; shared, so leave it as it was."""
    run = drafter_run("smollm2-135m", data, tmp_path_factory.mktemp("done") / "out", settings=SMALL)
    return train_drafter(run)


# -- what a run leaves ----------------------------------------------------------------------------------------


def test_smollm2_learns_its_rows(done: Outcome) -> None:
    losses = [each.loss for each in done.progress.history]
    assert losses[0] is None
    assert all(later < 0.9 * earlier for earlier, later in pairwise(losses[1:]))  # type: ignore[operator]
    assert done.kept.held_back < 0.5 * done.untuned.held_back
    assert done.kept.tokens_right > done.untuned.tokens_right
    assert done.untuned.drafted is not None
    assert done.kept.drafted is not None
    assert done.untuned.drafted.count == done.kept.drafted.count == 1
    assert done.kept.drafted.malformed == 0 < done.untuned.drafted.malformed


def test_what_a_run_leaves(done: Outcome, data: Path) -> None:
    assert {path.name for path in done.out.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "README.md", "drafter.json", "training.jsonl", "loss.png",
        "drafts.png", "work",
    }  # fmt: skip
    assert {path.name for path in (done.out / "work").iterdir()} == {
        ".lock", "settings.json", "checkpoint.safetensors"
    }  # fmt: skip
    assert {tensor.dtype for tensor in load_file(done.out / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    config = json.loads((done.out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "smollm2-135m"
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip
    record = json.loads((done.out / "drafter.json").read_text())
    assert record["kept"]["held_back"] == done.kept.held_back
    assert record["rows"]["training"] == 3
    assert record["rows"]["sources"] == {"made by a test": 3}
    assert record["data"][0]["rows"] == 5
    assert record["licence"] == "Apache-2.0"
    card = (done.out / "README.md").read_text(encoding="utf-8")
    digest = record["checksums"]["model.safetensors"]
    for part in (
        "3 steps on 9 rows",
        "all 3 epochs are done",
        f"| loss, nats a token of a draft | {done.untuned.held_back:.4f} | {done.kept.held_back:.4f} |",
        "| drafts malformed | 1 (100%) | 0 (0%) |",
        "base model's is Apache-2.0",
        f"`model.safetensors` {digest}",
        "| `rows.jsonl` | 5 | `",
        "| made by a test | 3 |",
        "| learning_rate | 0.005 |",
        "specrag train drafter ...",
    ):
        assert part in card, part


def test_the_engine_computes_what_peft_computes(done: Outcome, data: Path, smollm2_files: ModelFiles) -> None:
    example = ExampleEncoder(Tokenizer(smollm2_files), length=1024, rationales=True).example(
        read_rows([data])[0]
    )
    assert example is not None

    def ours(model: SessionModel) -> Logits:
        tokens = list(example.tokens)
        (rows,) = model.forward([Segment(model.new_cache(), tokens, None, [LOGITS] * len(tokens))])
        return np.stack([each.logits for each in rows if each.logits is not None])

    def theirs(module: Any) -> Logits:
        with torch.no_grad():
            found: Logits = module(torch.tensor([example.tokens])).logits[0].numpy()
        return found

    base = AutoModelForCausalLM.from_pretrained(smollm2_files.folder, dtype=torch.float32).eval()
    without = theirs(base)
    expected = theirs(peft.PeftModel.from_pretrained(base, done.out).eval())
    change = np.abs(expected - without).mean()
    assert change > 0.5, "the adapter must matter for the comparison to mean something"
    weights = {name: tensor.float() for name, tensor in read_weights(smollm2_files).items()}
    merged = merge_adapter(weights, done.out, base="smollm2-135m")
    exact = LeanDecoder(read_config(smollm2_files), merged, dtype=torch.float32, device=CPU)
    np.testing.assert_allclose(ours(exact), expected, atol=1e-3)
    # Loaded as anybody would, the merged weights are rounded once to the files' own type, bf16.
    loaded = load_model("smollm2-135m", dtype="fp32", device="cpu", adapter=done.out)
    assert np.abs(ours(loaded.model) - expected).mean() < 0.03 * change


def test_it_drafts_right_in_int8(done: Outcome, data: Path) -> None:
    llm = specrag.load("smollm2-135m", dtype="int8", device="cpu", adapter=done.out)
    try:
        drafted = count_drafts(llm, read_rows([data])[:2])
    finally:
        llm.close()
    assert drafted.malformed == 0
    assert drafted.right >= 1


def test_all_weights_become_a_model(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    full = replace(TINY, full=True, held_back=2, epochs=1, learning_rate=1e-3)
    outcome = train_drafter(drafter_run(tiny_model, data, tmp_path / "full", settings=full))
    before, after = load_model(tiny_model, device="cpu"), load_model(outcome.out, device="cpu")
    assert before.tokenizer.definition() == after.tokenizer.definition()
    assert before.tokenizer.chat_text([{"role": "user", "content": "?"}]) == after.tokenizer.chat_text(
        [{"role": "user", "content": "?"}]
    )
    first, second = (load_file(path / "model.safetensors") for path in (tiny_model, outcome.out))
    assert first.keys() == second.keys()
    assert all(not torch.equal(tensor, second[name]) for name, tensor in first.items() if tensor.dim() == 2)


def test_a_finished_run_is_not_run_again(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    run = drafter_run(tiny_model, data, tmp_path, settings=replace(TINY, held_back=2, epochs=1))
    done = train_drafter(run)
    before = (done.out / "adapter_model.safetensors").read_bytes()
    told: list[Status[Any]] = []
    again = train_drafter(run, told.append)
    assert not told
    assert (again.kept, again.progress.ended) == (done.kept, done.progress.ended)
    assert (done.out / "adapter_model.safetensors").read_bytes() == before
    # Another run in the same folder begins anew if that is asked for.
    fresh = train_drafter(replace(run, settings=replace(run.settings, rank=2), fresh=True), told.append)
    assert told
    assert fresh.kept != done.kept


def test_a_time_limit_stops_in_good_order(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 20.0
        return now

    settings = replace(TINY, held_back=2, epochs=3, batch_rows=1)
    for _ in range(30):
        outcome = train_drafter(
            drafter_run(tiny_model, data, tmp_path / "parts", settings=settings, minutes=4.0), clock=clock
        )
        assert (tmp_path / "parts" / "adapter_model.safetensors").is_file()
        if outcome.progress.ended:
            break
    assert outcome.progress.ended == "all 3 epochs are done"
    whole = train_drafter(drafter_run(tiny_model, data, tmp_path / "whole", settings=settings))
    assert outcome.progress.history == whole.progress.history
    first, second = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("parts", "whole")
    )
    assert first == second


# -- steps ----------------------------------------------------------------------------------------------------


def test_the_loss_is_of_drafts_alone_and_of_all_parts_together(
    tiny_model: Path, data: Path, tmp_path: Path
) -> None:
    """Gradients of a step in parts are those of each row by itself, weighted by its tokens."""
    loop = loop_in(tiny_model, data, tmp_path, replace(TINY, held_back=1, batch_tokens=1500))
    objective = loop.objective
    assert isinstance(objective, DrafterObjective)
    gathered = objective.learn([0, 1, 2], DrafterProgress())
    gradients = {
        name: value.grad.clone() for name, value in objective.trained.items() if value.grad is not None
    }
    alone = tiny_tuned(tiny_model)
    examples = [objective.training[number] for number in range(3)]
    count = sum(len(each.tokens) - each.begin for each in examples)
    total = 0.0
    for each in examples:
        logits = alone.module(input_ids=torch.tensor([each.tokens])).logits[0]
        behind = torch.tensor(each.tokens[each.begin :])
        log_probs = torch.log_softmax(logits[each.begin - 1 : -1].float(), dim=-1)
        loss = -log_probs.gather(1, behind[:, None]).sum() / count
        loss.backward()
        total += float(loss.detach())
    assert gathered == pytest.approx(total, rel=1e-5)
    assert gradients
    for name, value in alone.trained.items():
        if name in gradients:
            assert value.grad is not None
            torch.testing.assert_close(gradients[name], value.grad, rtol=1e-4, atol=1e-6)


def test_batches_pad_at_the_end_and_want_drafts_alone() -> None:
    short, long = Example((1, 2, 3), 2, False), Example((4, 5, 6, 7, 8), 3, False)
    batch = make_batch([short, long], CPU)
    assert batch.tokens.tolist() == [[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]
    assert batch.targets.tolist() == [[-100, 3, -100, -100, -100], [-100, -100, 7, 8, -100]]
    assert parts([short, long, short], 6) == [[long], [short, short]]
    assert parts([short, long, short], 1) == [[long], [short], [short]]


def test_every_epoch_has_every_row_in_its_own_order() -> None:
    epochs = plan(10, 4, 2, 0)
    assert [[len(step) for step in epoch] for epoch in epochs] == [[4, 4, 2], [4, 4, 2]]
    first, second = ([row for step in epoch for row in step] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert plan(10, 4, 2, 1) != epochs


def test_it_ends_where_the_curve_is_flat(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    settings = replace(TINY, held_back=2, epochs=50, learning_rate=1e-12, patience=3)
    drafts = iter(range(100))
    loop = loop_in(tiny_model, data, tmp_path, settings, draft=lambda: Drafted(next(drafts), 0, 0))
    loop.run(to_the_end)
    assert loop.progress.ended == "3 measurements have not lowered the held-back loss"
    assert [each.drafted for each in loop.progress.history] == [Drafted(number, 0, 0) for number in range(4)]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(1.0, done / 1000) for done in range(1001)]
    assert rates[0] == 0
    assert max(rates) == rates[30] == 1.0
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert TuningSettings().highest_rate == ADAPTER_RATE
    assert TuningSettings(full=True).highest_rate == FULL_RATE
    assert TuningSettings(full=True, learning_rate=0.5).highest_rate == 0.5


# -- what can be wrong ----------------------------------------------------------------------------------------


def test_other_settings_and_rows_are_named(done: Outcome, data: Path, tmp_path: Path) -> None:
    before = (done.out / "work" / "checkpoint.safetensors").read_bytes()
    other = replace(SMALL, rank=8, rationales=False)
    with pytest.raises(InputError, match="rank 4 there, 8 here; rationales True there, False here") as caught:
        train_drafter(drafter_run("smollm2-135m", data, done.out, settings=other))
    assert "--fresh" in str(caught.value)
    more = write_rows(tmp_path / "rows.jsonl", [row(number) for number in range(6)])
    with pytest.raises(InputError, match=r"sha256 of rows\.jsonl"):
        train_drafter(drafter_run("smollm2-135m", more, done.out, settings=SMALL))
    assert (done.out / "work" / "checkpoint.safetensors").read_bytes() == before


def test_another_base_model_is_named(tiny_model: Path, done: Outcome, data: Path) -> None:
    with pytest.raises(InputError, match="model 'smollm2-135m' there"):
        train_drafter(drafter_run(tiny_model, data, done.out, settings=SMALL))


def test_an_adapter_of_another_model_is_refused(done: Outcome, tiny_model: Path) -> None:
    state = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(576, 576)}
    with pytest.raises(
        ModelFilesError, match="trained for 'smollm2-135m' and cannot be added to 'gemma-3-270m'"
    ):
        merge_adapter(state, done.out, base="gemma-3-270m")
    # A folder may have any name: there the tensors decide.
    with pytest.raises(ModelFilesError, match=r"belongs to another model|which this model lacks"):
        load_model(tiny_model, device="cpu", adapter=done.out)


def test_hub_ids_are_compared_by_the_model(done: Outcome, tmp_path: Path) -> None:
    config = json.loads((done.out / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = (done.out / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(ModelFilesError, match="load it with 'HuggingFaceTB/SmolLM2-135M-Instruct'"):
        merge_adapter({}, tmp_path, base="HuggingFaceTB/SmolLM2-135M")
    for base in ("mirror/smollm2-135m-instruct", "smollm2-135m", "some-folder"):
        with pytest.raises(ModelFilesError, match="which this model lacks"):
            merge_adapter({}, tmp_path, base=base)


def test_adapters_by_name(done: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_adapter(done.out) == done.out
    with pytest.raises(InputError, match=r"adapter: 'nothing' .* with an adapter_config\.json"):
        find_adapter("nothing")
    shipped = tmp_path / "drafters" / "popular"
    shipped.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (shipped / name).write_bytes((done.out / name).read_bytes())
    monkeypatch.setattr(adapters, "SHIPPED", tmp_path / "drafters")
    assert find_adapter("popular") == shipped
    with pytest.raises(InputError, match="one that comes with specrag: popular"):
        find_adapter("nothing")
    loaded = load_model("smollm2-135m", dtype="int8", device="cpu", adapter="popular")
    assert loaded.adapter == shipped
    assert loaded.drafter_form is None
    assert load_model("smollm2-135m", device="cpu", adapter=done.out).drafter_form == "paper"
    assert catalog.resolve("smollm2-135m").folder == loaded.files.folder


def test_rows_that_are_evaluated_on_are_left_out(tiny_model: Path, data: Path, tmp_path: Path) -> None:
    evaluation = write_rows(tmp_path / "benchmark.jsonl", [row(0)])
    settings = replace(TINY, held_back=2, epochs=1)
    run = drafter_run(tiny_model, data, tmp_path / "out", settings=settings, exclude=(evaluation,))
    outcome = train_drafter(run)
    record = json.loads((outcome.out / "drafter.json").read_text())["rows"]
    assert (record["excluded"], record["training"] + record["held_back"]) == (1, 4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"held_back": 0}, "held_back"),
        ({"rank": 0}, "rank"),
        ({"length": 100}, "length"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"alpha": float("nan")}, "alpha"),
        ({"precision": "int8"}, "precision"),
        ({"rows": -1}, "rows"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        TuningSettings(**changes)
    assert caught.value.field == field


# -- the command line -----------------------------------------------------------------------------------------


def test_the_command_tells_what_came_of_it(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "drafter", str(data), "--out", str(tmp_path / "out"), "--model", str(tiny_model)]
    words += ["--device", "cpu", "--held-back", "2", "--drafts", "0", "--epochs", "1", "--precision", "fp32"]
    assert frame.run(words) == 0
    told = capsys.readouterr()
    assert [line.split(":")[0] for line in told.out.splitlines()] == ["trained", "untuned", "kept", "written"]
    assert "1 steps on 3 rows (all 1 epochs are done)" in told.out
    assert " 0 of 1 steps, held back: loss " in told.err


def test_the_command_names_rows_without_rationales(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = write_rows(tmp_path / "bare.jsonl", [row(number, rationale=None) for number in range(4)])
    words = ["train", "drafter", str(bare), "--out", str(tmp_path / "out"), "--model", str(tiny_model)]
    assert frame.run(words) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "rationale: \"4 of 4 rows, such as 'r0'\" is not usable" in told.err
    assert "--without-rationales" in told.err
    assert not (tmp_path / "out").exists()


def test_a_tuned_drafter_is_shown_no_example(
    done: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kb = str(build_sample(tmp_path / "kb"))
    options = (
        "index=bm25",
        "drafts=1",
        "passages_per_draft=1",
        "draft_tokens=16",
        "without=self-contain,self-reflect",
        "form=paper",
    )
    words = ["ask", "Who discovered radium?", "--kb", kb, "-m", "speculative-rag", "-k", "1", "--json"]
    words += [word for option in options for word in ("-o", option)]
    read = []
    plain, tuned = tmp_path / "adapter", done.out
    plain.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (plain / name).write_bytes((done.out / name).read_bytes())
    for adapter in (plain, tuned):
        capsys.readouterr()
        assert frame.run([*words, "-o", f"adapter={adapter}"]) == 0
        read.append(json.loads(capsys.readouterr().out)["details"]["drafts"][0]["prompt_tokens"])
    assert read[1] < read[0] - 50
