"""The papers' experiments: what they print, how they are run again, which claims hold, and the ledger of all of it."""
