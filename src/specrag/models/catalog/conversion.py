"""GGUF to a transformers folder: bf16 safetensors, configuration and tokenizer.

transformers itself reads the file (``gguf_file=...``), so every architecture it knows works, with the weights that it
computes. Writing is done here, one tensor at a time, so that a full disk raises ``OSError`` and memory holds no second
copy.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specrag.errors import ModelFilesError
from specrag.models.chat import END_TOKENS

if TYPE_CHECKING:
    import torch

_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}
_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


@dataclass(frozen=True)
class GgufSummary:
    """What the header of a GGUF file says.

    Attributes:
        parameters: number of weights.
        licence: the licence that the file states, or "unknown".
        pre_tokenizer: llama.cpp's name for how text is split before BPE, or "".
        end_tokens: ids of the control tokens that end a turn or a text, sorted.
    """

    parameters: int
    licence: str
    pre_tokenizer: str
    end_tokens: tuple[int, ...]


def read_summary(gguf: Path) -> GgufSummary:
    """Read a GGUF header and check that the file is as long as the header says.

    Raises:
        ModelFilesError: the file is missing, damaged, truncated or not a GGUF file.
    """
    from gguf import GGUFReader

    if not gguf.is_file():
        raise ModelFilesError(f"GGUF file {str(gguf)!r} does not exist: check the path")
    with _reading(gguf):
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFilesError(f"GGUF file {str(gguf)!r} does not begin with 'GGUF': give a GGUF file")
        reader = GGUFReader(gguf)
        parameters = sum(int(tensor.n_elements) for tensor in reader.tensors)
        return GgufSummary(
            parameters=parameters,
            licence=str(_field(reader, "general.license") or "unknown"),
            pre_tokenizer=str(_field(reader, "tokenizer.ggml.pre") or ""),
            end_tokens=_end_tokens(reader),
        )


def convert_gguf(gguf: Path, folder: Path, *, summary: GgufSummary, progress: bool = False) -> None:
    """Write the model in ``gguf`` as a transformers folder with bf16 weights.

    Args:
        gguf: a GGUF file of a causal language model, with its tokenizer.
        folder: an existing empty folder.
        summary: what the header of the same file says.

    Raises:
        ModelFilesError: transformers cannot read the file.
        OSError: the folder cannot be written.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _reading(gguf), _quiet(not (progress and sys.stderr.isatty())):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
    config = model.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    end_tokens = sorted({*summary.end_tokens, *_as_list(config.get("eos_token_id"))})
    generation = {
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": end_tokens,
        "pad_token_id": config.get("pad_token_id"),
    }
    write_safetensors(folder / "model.safetensors", _stored_once(model.state_dict()), progress=progress)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    _write_json(folder / "tokenizer.json", _tokenizer_json(tokenizer, summary.pre_tokenizer))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, config))


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], *, progress: bool = False) -> None:
    """Write tensors in the safetensors format, one at a time.

    Raises:
        OSError: the file cannot be written.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        header[name] = {"dtype": _DTYPES[str(tensor.dtype)], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight bytes
    with (
        path.open("wb") as file,
        tqdm(
            total=end, desc="writing weights", unit="B", unit_scale=True, disable=None if progress else True
        ) as bar,
    ):
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            content = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            bar.update(file.write(content.data))


def _stored_once(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state without the second name of a tied matrix (the output head, if it shares the embedding)."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in state.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def _tokenizer_json(tokenizer: Any, pre_tokenizer: str) -> dict[str, Any]:
    """The tokenizer's serialised form, with the pre-tokenizer restored, which GGUF only names.

    Sources: tokenizer.json of HuggingFaceTB/SmolLM2-135M-Instruct and of Qwen/Qwen2.5-Coder-1.5B-Instruct.
    """
    content: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    if pre_tokenizer == "smollm":
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    elif pre_tokenizer == "qwen2":
        content["normalizer"] = {"type": "NFC"}
    return content


def _tokenizer_config(tokenizer: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    tokens = tokenizer.special_tokens_map
    special = {name: token for name, token in tokens.items() if isinstance(token, str)}
    content: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings"),
        **special,
    }
    if tokenizer.chat_template:
        content["chat_template"] = tokenizer.chat_template
    return content


def _end_tokens(reader: Any) -> tuple[int, ...]:
    tokens, kinds = reader.fields.get("tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    if tokens is None or kinds is None:
        return ()
    ends = {token.encode() for token in END_TOKENS}
    return tuple(
        index
        for index, kind in enumerate(kinds)
        if kind == _CONTROL_TOKEN and tokens.parts[tokens.data[index]].tobytes() in ends
    )


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)


@contextlib.contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Add the file's name to whatever a parser raises: a damaged file can fail at any point, in any way."""
    try:
        yield
    except ModelFilesError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelFilesError(
            f"GGUF file {str(gguf)!r} cannot be read ({reason}): it is truncated, damaged or of an "
            "architecture that transformers does not know; fetch it again"
        ) from error


@contextlib.contextmanager
def _quiet(active: bool) -> Iterator[None]:
    """Suppress the progress bars of transformers' loader, which has no single switch for all of them."""
    if active:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    else:
        yield
