"""CAMEL-AI on an `ArealOpenAI` client, under the name that AReaL gives it. CAMEL needs an environment of its own."""

from typing import Any

from camel.models import OpenAICompatibleModel
from camel.utils import BaseTokenCounter

from .direct import ArealOpenAI


class _Counter(BaseTokenCounter):
    """Counts with the policy's tokenizer, or about three characters a token without one. CAMEL's own downloads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        texts = [str(message.get("content") or "") for message in messages]
        if self._tokenizer is None:
            return sum(map(len, texts)) // 3
        return sum(len(self.encode(text)) for text in texts)

    def encode(self, text: str) -> list[int]:
        ids = list(text.encode()) if self._tokenizer is None else self._tokenizer.encode(text)
        return list(getattr(ids, "ids", ids))

    def decode(self, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return bytes(token_ids).decode(errors="replace")
        return str(self._tokenizer.decode(token_ids))


class AReaLOpenAICompatibleModel(OpenAICompatibleModel):
    """A CAMEL model backend whose calls go through `openai_client`. Asynchronous: use `ChatAgent.astep`."""

    def __init__(
        self,
        openai_client: ArealOpenAI,
        tokenizer: Any = None,
        model_type: str = "areal",
        model_config_dict: dict[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(
            model_type=model_type,
            model_config_dict=model_config_dict,
            api_key=openai_client.api_key,
            url=str(openai_client.base_url),
            token_counter=_Counter(tokenizer),
            client=_AsyncOnly(),
            async_client=openai_client,
            **keywords,
        )


class _AsyncOnly:
    def __getattr__(self, name: str) -> Any:
        raise TypeError("this model is asynchronous; use `await agent.astep(...)` instead of `agent.step(...)`")
