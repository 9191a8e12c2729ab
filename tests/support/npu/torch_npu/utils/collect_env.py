def get_cann_version() -> str:
    return "8.5.0"
