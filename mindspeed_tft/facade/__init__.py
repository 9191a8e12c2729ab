"""Names of another fault-tolerance SDK, served by our engine, so that an adaptor written for it runs unchanged.

Off unless it is asked for by an import: see `mindio`. `docs/mindio-facade.md` says what is served and what is refused.
"""
