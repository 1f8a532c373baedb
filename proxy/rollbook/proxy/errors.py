"""What can go wrong between an agent and its answer, one tree. Routes turn these into each vendor's own shape.

    ProxyError(status, code)
    ├── BadRequest          400 the body is not what the API takes, or asks for what this server does not do
    │   ├── ContextOverflow 400 prompt + one token does not fit; code `context_length_exceeded`
    │   ├── WrongMethod     405 a good path, asked in the wrong way
    │   └── TooLarge        413 a body over the limit
    ├── Unauthorized        401 no key, or a key nobody issued
    ├── Forbidden           403 a good key on the wrong route
    ├── NotFound            404
    ├── Conflict            409
    ├── SessionEnded        410 the episode is closed
    ├── Busy                429 no capacity; carries retry_after_s
    ├── EngineFailed        502 the engine answered nonsense or broke off
    ├── EngineUnavailable   503 the engine is down or restarting; carries retry_after_s
    └── NotRecorded         503 the answer could not be made durable, so nobody gets it

Every message says what was expected, what came and what to do.
"""


class ProxyError(Exception):
    """Root of everything the proxy raises on purpose."""

    status = 500
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(ProxyError):
    """The body is not what the API takes, or asks for what this server does not do; `param` names the field."""

    status = 400
    code = "invalid_request"


class ContextOverflow(BadRequest):
    """The prompt and one more token do not fit the model's context."""

    code = "context_length_exceeded"

    @classmethod
    def of(cls, n_prompt: int, most: int, *, is_least: bool = False) -> "ContextOverflow":
        """For a prompt of (at least) so many tokens, where prompt and answer together may have `most`."""
        return cls(
            f"the prompt has {'at least ' if is_least else ''}{n_prompt} tokens and leaves no room for an answer: "
            f"prompt and answer together may have {most}; shorten the messages",
            param="messages",
        )


class WrongMethod(BadRequest):
    """A good path, asked in the wrong way; `allow` names the methods that it takes, as the header of that name does."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class TooLarge(BadRequest):
    """A body over the limit."""

    status = 413
    code = "request_too_large"


class Unauthorized(ProxyError):
    """No key, or a key nobody issued."""

    status = 401
    code = "invalid_api_key"


class Forbidden(ProxyError):
    """A good key on the wrong route."""

    status = 403
    code = "forbidden"


class NotFound(ProxyError):
    """Nothing by that id."""

    status = 404
    code = "not_found"


class Conflict(ProxyError):
    """It clashes with what is open."""

    status = 409
    code = "conflict"


class SessionEnded(ProxyError):
    """The episode is closed; its data stays readable."""

    status = 410
    code = "session_ended"


class Busy(ProxyError):
    """No capacity now; `retry_after_s` says when to come back."""

    status = 429
    code = "rate_limit_exceeded"


class EngineFailed(ProxyError):
    """The engine answered nonsense or broke off."""

    status = 502
    code = "engine_failed"


class EngineUnavailable(ProxyError):
    """The engine is down or restarting."""

    status = 503
    code = "engine_unavailable"


class NotRecorded(ProxyError):
    """The answer could not be made durable, so nobody gets it. Asking again does not help."""

    status = 503
    code = "not_recorded"
