"""Files that others read, written whole or not at all; pages of one file; streams that break. No torch."""
