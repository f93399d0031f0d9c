from typing import Any

DHTID: Any
