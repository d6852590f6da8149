"""The refusal of a request of an agent."""


class Refused(Exception):
    """A request that cannot be answered: `param` is the field, `code` is for programs, `status` is HTTP's."""

    def __init__(
        self, message: str, param: str | None = None, code: str = "unsupported_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status
