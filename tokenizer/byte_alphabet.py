"""GPT-2's one-to-one map between the 256 bytes and 256 printable characters, in which token files are written."""


def _byte_order() -> list[int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + sorted(set(range(256)) - set(printable))


# The bytes in the order of their characters' code points: the order in which trained byte tokens get their ids.
BYTE_ORDER: tuple[int, ...] = tuple(_byte_order())
# Printable bytes stand for themselves; the 68 others, in order, for the characters from U+0100 on.
_CHAR_OF_BYTE: dict[int, str] = {byte: chr(byte if i < 188 else 0x100 + i - 188) for i, byte in enumerate(BYTE_ORDER)}
_BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in _CHAR_OF_BYTE.items()}


def bytes_to_chars(data: bytes) -> str:
    """Bytes as the printable characters that stand for them."""
    return data.decode("latin-1").translate(_CHAR_OF_BYTE)


def chars_to_bytes(chars: str) -> bytes:
    """The inverse of `bytes_to_chars`.

    Raises:
        KeyError: a character that stands for no byte.
    """
    return bytes([_BYTE_OF_CHAR[char] for char in chars])
