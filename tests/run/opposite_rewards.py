"""Two rewards of which one is high where the other is low."""


def digits(response: str, row: dict) -> float:
    """Return the share of digits in a response."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def others(response: str, row: dict) -> float:
    """Return the share of other characters."""
    return 1 - digits(response, row)
