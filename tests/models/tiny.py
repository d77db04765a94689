"""A Llama of 0.2 million random weights as GGUF file and as wheels: real files that convert in a moment."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize

from specrag.models.catalog.download import Wheel
from specrag.models.catalog.sources import Source

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 64, 2, 4, 2, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, *, seed: int = 0) -> Path:
    """Write a byte-level Llama with Q8_0 matrices and tied embeddings."""
    draw = np.random.default_rng(seed)
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(b) for b in letters] + [chr(256 + i) for i in range(256 - len(letters))]
    merges = ["h e", "l l", "Ġ t"]
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in merges)]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, columns: int) -> None:
        values = draw.normal(0, 0.1, (rows, columns)).astype(np.float32)
        packed = quantize(values, GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q8_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", draw.normal(1, 0.1, HIDDEN).astype(np.float32))

    matrix("token_embd", len(tokens), HIDDEN)
    norm("output_norm")
    kv_size = HIDDEN * KV_HEADS // HEADS
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        norm(f"{block}.attn_norm")
        norm(f"{block}.ffn_norm")
        matrix(f"{block}.attn_q", HIDDEN, HIDDEN)
        matrix(f"{block}.attn_k", kv_size, HIDDEN)
        matrix(f"{block}.attn_v", kv_size, HIDDEN)
        matrix(f"{block}.attn_output", HIDDEN, HIDDEN)
        matrix(f"{block}.ffn_gate", FEED_FORWARD, HIDDEN)
        matrix(f"{block}.ffn_up", FEED_FORWARD, HIDDEN)
        matrix(f"{block}.ffn_down", HIDDEN, FEED_FORWARD)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheels(folder: Path, *, parts: int = 4) -> None:
    """Cut the tiny GGUF into wheels, as large models on PyPI are."""
    folder.mkdir(parents=True, exist_ok=True)
    gguf = write_gguf(folder / "tiny.gguf")
    content = gguf.read_bytes()
    size = -(-len(content) // parts)
    for number in range(1, parts + 1):
        package = f"specrag_tiny_part{number}"
        info = f"{package}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{package}/data/part{number}.bin", content[(number - 1) * size : number * size])
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")


def source(folder: Path) -> Source:
    """The catalog entry for the wheels in ``folder``."""
    wheels = []
    for number, path in enumerate(sorted(folder.glob("*.whl")), 1):
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        wheels.append(Wheel(f"specrag-tiny-part{number}", "1.0", len(content), digest))
    content = (folder / "tiny.gguf").read_bytes()
    return Source(
        name="tiny",
        description="random weights",
        good_for="nothing",
        licence="Apache-2.0",
        origin="made by a test",
        kind="gguf",
        member="*/data/part*.bin",
        sha256=hashlib.sha256(content).hexdigest(),
        unpacked_bytes=len(content),
        ready_bytes=1_000_000,
        wheels=tuple(wheels),
    )


def environment(home: Path, wheels: Path | None = None) -> dict[str, str]:
    """The environment of a process that uses ``home`` and finds wheels only in a folder."""
    extra = {"SPECRAG_HOME": str(home), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    if wheels is not None:
        extra |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    return os.environ | extra


def start(code: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Run Python code in a process group of its own, so that it can be killed with its children."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def specrag(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    command = [sys.executable, "-m", "specrag", *arguments]
    return subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False)


def make_code(wheels: Path) -> str:
    """Code that makes the model of ``source(wheels)``; a specrag error is printed and ends it with 1."""
    return f"""
from pathlib import Path
from specrag.errors import SpecragError
from specrag.models import catalog
from tests.models import tiny
try:
    print(catalog.make(tiny.source(Path({str(wheels)!r}))).folder)
except SpecragError as error:
    raise SystemExit(f"error: {{error}}")
"""
