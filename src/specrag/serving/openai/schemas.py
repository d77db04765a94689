"""Request bodies: OpenAI's, with the additional field ``specrag``.

Unknown fields are refused, so that a misspelt one is not silently without effect. Fields of OpenAI's API that have no
effect here (such as ``user``) are accepted and ignored. Numbers are checked where they are used, by the rules that
Python and the command line share.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from specrag.request import SearchOptions

#: Most choices of one request.
MAX_CHOICES = 16

#: Most texts of one embeddings request.
MAX_INPUTS = 2048

#: Most prompts of one completions request.
MAX_PROMPTS = 64

#: Most parts of one message, and entries of ignored fields.
MAX_PARTS, MAX_IGNORED = 256, 64

#: Most tool calls in one message.
MAX_CALLS = 64

#: Most stop strings of one request, and characters of each.
MAX_STOPS, MAX_STOP_LENGTH = 16, 256

_MOST_UNKNOWN = 8  # unknown fields that are reported one by one

Count: TypeAlias = Annotated[int, Field(ge=1, le=1_000_000)]
ConditionText: TypeAlias = Annotated[str, Field(max_length=1000)]
#: A list, since JSON has no tuples.
Conditions: TypeAlias = (
    ConditionText
    | Annotated[list[ConditionText], Field(max_length=32, fail_fast=True)]
    | Annotated[dict[Annotated[str, Field(max_length=200)], JsonValue], Field(max_length=16, fail_fast=True)]
)
StopText: TypeAlias = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


def _example(**fields: Any) -> ConfigDict:
    """A configuration that gives the API's description an example of a body."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class Body(BaseModel):
    """Base of request bodies: refuses unknown fields, and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, values: Any) -> Any:
        """Refuse a body with very many unknown fields as a whole: each would be an error of its own."""
        if isinstance(values, dict) and len(values) > len(cls.model_fields) + _MOST_UNKNOWN:
            raise ValueError("it has more fields than there are; send those of the API alone")
        return values


class SpecragField(Body, SearchOptions):
    """How to answer: which knowledge base, which method, and how passages are found."""

    kb: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="Name of a knowledge base of this server; null answers without one."
    )
    method: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A name of GET /v1/specrag/methods; null takes the server's default."
    )
    options: dict[str, JsonValue] = Field(
        default_factory=dict, description="Of that method, as the same call lists them."
    )
    where: Conditions = Field(  # type: ignore[assignment]
        default_factory=list,
        description='Conditions on metadata: a text such as "year>=2000 and not title=A,B", a list of texts that must '
        'all hold, or an object such as {"year": {">=": 2000}}.',
    )
    fresh: bool = Field(
        False, description="Read the whole prompt, whatever earlier requests left of it; to compare methods."
    )
    events: bool = Field(False, description="Tell of sources and rounds in the stream's chunks.")
    deadline: Annotated[float, Field(gt=0, le=86_400)] | None = Field(
        None, description="Seconds from the request's arrival after which it is ended."
    )


class StreamOptions(Body):
    """How a stream is told.

    Attributes:
        include_usage: send a last chunk with the counts of tokens.
        include_obfuscation: ignored.
    """

    include_usage: bool = False
    include_obfuscation: bool | None = None


class TextBody(Body):
    """The fields of all requests for a text."""

    model: Annotated[str, Field(max_length=256)]
    specrag: SpecragField | None = None
    # Accepted and ignored.
    user: str | None = None

    @property
    def extension(self) -> SpecragField:
        """The field ``specrag``, our extension of the API; its defaults if it is left out."""
        return self.specrag or SpecragField()


class GenerationBody(TextBody):
    """The fields that completions and chat completions share."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=1024, fail_fast=True)]
        | None
    ) = None
    # Not in OpenAI's API, under the names that other servers use.
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool = False


class CompletionRequest(GenerationBody):
    """Body of ``POST /v1/completions``."""

    model_config = _example(model="smollm2-135m", prompt="Copper is", max_tokens=16)

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[int], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[int], Field(min_length=1, fail_fast=True)]],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        ]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None  # as in vLLM
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class ContentPart(Body):
    """A piece of a message; texts only, for now."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """A function that the model has called; ``arguments`` is JSON as a text."""

    name: Annotated[str, Field(max_length=128)]
    arguments: str


class ToolCall(Body):
    """A call of a tool, in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """A message of the conversation; ``tool`` messages answer a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    # What an assistant's message may also hold when a client sends it back as received.
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=MAX_IGNORED)] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """A tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """A schema that the answer must satisfy."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletionRequest(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    model_config = _example(model="smollm2-135m", messages=[{"role": "user", "content": "Hello!"}])

    messages: Annotated[list[Message], Field(min_length=1, max_length=1024, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Accepted and ignored.
    metadata: Annotated[dict[str, str], Field(max_length=MAX_IGNORED, fail_fast=True)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8, fail_fast=True)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponsePart(Body):
    """A piece of a message; what an answer's piece carries beside its text may be sent back."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=MAX_IGNORED)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=MAX_IGNORED)] | None = None


ResponseText: TypeAlias = str | Annotated[list[ResponsePart], Field(max_length=MAX_PARTS, fail_fast=True)]


class ResponseItem(Body):
    """A message, a call of a function, or what it has answered."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ResponseText | None = None
    call_id: str | None = None
    name: Annotated[str, Field(max_length=128)] | None = None
    arguments: str | None = None
    output: ResponseText | None = None
    # Accepted and ignored.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    namespace: str | None = None
    summary: Annotated[list[Any], Field(max_length=MAX_IGNORED)] | None = None
    encrypted_content: str | None = None


class ResponseTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class NamedResponseTool(Body):
    """A function that the model must call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponseRequest(TextBody):
    """Body of ``POST /v1/responses``."""

    model_config = _example(model="smollm2-135m", input="Hello!")

    input: str | Annotated[list[ResponseItem], Field(min_length=1, max_length=1000, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = Field(None, description="false; nothing is kept.")
    previous_response_id: str | None = Field(None, description="Refused: send the whole conversation.")
    metadata: Annotated[dict[str, str], Field(max_length=MAX_IGNORED, fail_fast=True)] | None = None
    # Accepted and ignored.
    include: Annotated[list[str], Field(max_length=MAX_IGNORED, fail_fast=True)] | None = None
    reasoning: dict[str, JsonValue] | None = None
    service_tier: str | None = None
    truncation: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EmbeddingRequest(Body):
    """Body of ``POST /v1/embeddings``."""

    model_config = _example(model="minilm-l6-v2", input=["copper", "tin"])

    model: Annotated[str, Field(max_length=256)]
    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None


class RankedDocument(Body):
    """A document as an object."""

    text: str


class RerankRequest(Body):
    """Body of ``POST /v1/rerank``."""

    model_config = _example(model="minilm-l6-v2", query="What conducts?", documents=["Copper does.", "Tea."])

    model: Annotated[str, Field(max_length=256)]
    query: str
    documents: Annotated[
        list[str | RankedDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=1)] | None = Field(None, description="The best so many; by default all.")
    return_documents: bool | None = Field(None, description="false leaves the texts out.")


class ErrorDetail(BaseModel):
    """What went wrong, in OpenAI's form."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


CompletionRequest.model_rebuild()
