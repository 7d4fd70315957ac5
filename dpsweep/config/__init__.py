"""The files a user writes, checked once, with the line of every mistake."""
