"""The programs of examples/, run and checked."""
