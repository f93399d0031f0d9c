from typing import Any

DHTNode = Any
