"""A trained network behind HTTP, on one machine or with its parts on many."""

#: Addresses that no other machine reaches.
LOOPBACK = ("127.0.0.1", "localhost", "::1")
