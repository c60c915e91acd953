"""GPT-2's bijection between the 256 bytes and 256 printable characters, which token files are written in."""


def _byte_order() -> list[int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + sorted(set(range(256)) - set(printable))


# The bytes by the code point of their character, which is the order of the ids of byte tokens.
BYTE_ORDER: tuple[int, ...] = tuple(_byte_order())
# Printable bytes map to themselves; the 68 others map, in order, to the characters from U+0100 on.
_CHAR_OF_BYTE: dict[int, str] = {byte: chr(byte if i < 188 else 0x100 + i - 188) for i, byte in enumerate(BYTE_ORDER)}
_BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in _CHAR_OF_BYTE.items()}


def bytes_to_chars(data: bytes) -> str:
    """Convert bytes to their printable characters."""
    return data.decode("latin-1").translate(_CHAR_OF_BYTE)


def chars_to_bytes(chars: str) -> bytes:
    """The inverse of `bytes_to_chars`.

    Raises:
        KeyError: a character is not in the alphabet.
    """
    return bytes([_BYTE_OF_CHAR[char] for char in chars])
