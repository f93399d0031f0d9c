from typing import Any

DHTRecord = Any

class RecordValidatorBase:
    def validate(self, record: Any) -> bool: ...
