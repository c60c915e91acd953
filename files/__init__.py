"""Files that others read: written whole or not at all; pages that need nothing beside themselves. No torch."""
