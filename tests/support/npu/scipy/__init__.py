"""MindSpeed imports it for adaptive context parallelism, which is refused; nothing of it is here."""
