"""Collectives: patterns in which messages move between ranks. What the bytes mean, only a Codec knows."""
