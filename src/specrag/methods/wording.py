"""What standard RAG says to the model and to the reader, in the language of the question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specrag.methods.prompts import INSTRUCTION, LEAD, Message
from specrag.request import ABSTENTION


@dataclass(frozen=True, slots=True)
class Wording:
    """The texts in one language.

    Attributes:
        instruction: the text between the passages and the question.
        question: the label in front of the question.
        lead: how the answers of small models begin, which are better if they choose a passage first
            (docs/answering.md). It is not shown.
        abstention: the answer if nothing relevant was found.
    """

    instruction: str
    question: str
    lead: str
    abstention: str


ENGLISH = Wording(INSTRUCTION, "Question", LEAD, ABSTENTION)

_WORDINGS = {
    "english": ENGLISH,
    "german": Wording(
        "Beantworte die Frage in einem kurzen Satz anhand der Textstellen oben.",
        "Frage",
        "Laut Textstelle [",
        "Die Wissensbasis enthält nichts zu dieser Frage.",
    ),
    "french": Wording(
        "Réponds à la question en une courte phrase à partir des passages ci-dessus.",
        "Question",
        "Selon le passage [",
        "La base de connaissances ne contient rien sur cette question.",
    ),
    "spanish": Wording(
        "Responde a la pregunta en una frase corta a partir de los pasajes anteriores.",
        "Pregunta",
        "Según el pasaje [",
        "La base de conocimientos no contiene nada sobre esta pregunta.",
    ),
    "italian": Wording(
        "Rispondi alla domanda in una breve frase in base ai brani qui sopra.",
        "Domanda",
        "Secondo il brano [",
        "La base di conoscenza non contiene nulla su questa domanda.",
    ),
    "portuguese": Wording(
        "Responda à pergunta em uma frase curta com base nos trechos acima.",
        "Pergunta",
        "Segundo o trecho [",
        "A base de conhecimento não contém nada sobre esta pergunta.",
    ),
    "dutch": Wording(
        "Beantwoord de vraag in één korte zin op basis van de passages hierboven.",
        "Vraag",
        "Volgens passage [",
        "De kennisbank bevat niets over deze vraag.",
    ),
    "swedish": Wording(
        "Besvara frågan med en kort mening utifrån textavsnitten ovan.",
        "Fråga",
        "Enligt textavsnitt [",
        "Kunskapsbasen innehåller inget om den här frågan.",
    ),
    "russian": Wording(
        "Ответь на вопрос одним коротким предложением по приведённым выше отрывкам.",
        "Вопрос",
        "Согласно отрывку [",
        "В базе знаний нет ничего по этому вопросу.",
    ),
    "chinese": Wording(
        "请根据以上段落,用一句简短的中文回答问题。", "问题", "根据段落 [", "知识库中没有关于这个问题的内容。"
    ),
    "japanese": Wording(
        "上の文章をもとに、質問に短い一文で答えてください。",
        "質問",
        "文章 [",
        "ナレッジベースには、この質問に関する内容がありません。",
    ),
}


def wording(question: str, history: Sequence[Message] = ()) -> Wording:
    """The wording in the language of the question; if that is too short to tell, in that of earlier questions.

    For a language without a wording of its own, the English one asks for an answer in that language.
    """
    from specrag.retrieval import language_of

    asked = [question, *(message["content"] for message in reversed(history) if message["role"] == "user")]
    language = next((found for text in asked if (found := language_of(text)) is not None), "english")
    if language in _WORDINGS:
        return _WORDINGS[language]
    return replace(ENGLISH, instruction=f"{ENGLISH.instruction} Answer in {language.title()}.")
