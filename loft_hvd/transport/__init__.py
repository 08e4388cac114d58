"""How bytes travel between ranks: one small protocol, several engines behind it."""
