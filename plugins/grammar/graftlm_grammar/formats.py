"""The enforced values of the JSON schema keyword `format`, as regular expressions."""

from typing import Final

__all__ = ["FORMATS"]

_YEAR: Final = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP: Final = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR: Final = f"(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)"
_DATE: Final = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_MINUTE: Final = "[0-5][0-9]"
_TIME: Final = f"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:{_MINUTE})"
_DURATION_TIME: Final = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE: Final = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX: Final = "[0-9a-fA-F]"
_LABEL: Final = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_ATOM: Final = "[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_URI_CHAR: Final = "(?:[a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})"

#: Dates and times follow RFC 3339, without leap seconds and without the year 0. Each expression allows only texts of
#: its format, but not every such text.
FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]+W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})",
    "email": f"{_ATOM}(?:\\.{_ATOM})*@{_LABEL}(?:\\.{_LABEL})+",
    "ipv4": f"{_BYTE}(?:\\.{_BYTE}){{3}}",
    "uri": f"[a-zA-Z][a-zA-Z0-9+.-]*://{_LABEL}(?:\\.{_LABEL})*(?::[0-9]{{1,4}})?(?:/{_URI_CHAR}*)?(?:\\?{_URI_CHAR}*)?",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}
