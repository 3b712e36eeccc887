import pytest

from server.chat.served_model import ServedModel
from server.protocol.wire_errors import ApiError
from server.routes.service import Service
from tests.server.harness import MODEL, OTHER_NAMES


def test_a_model_has_one_id_and_several_names(service: Service) -> None:
    assert service.model.id == MODEL
    for name in (None, "", MODEL, MODEL.upper(), *OTHER_NAMES):
        service.model.check(name)
    for name in ("/", MODEL + " "):
        with pytest.raises(ApiError) as caught:
            service.model.check(name)
        assert (caught.value.status, caught.value.param) == (404, "model")
    with pytest.raises(ApiError, match=f"; did you mean '{MODEL}'"):
        service.model.check(f"{MODEL}s")


@pytest.mark.parametrize(
    ("names", "asked", "ours"),
    [
        (("alias",), "org/alias", True),
        (("alias",), "/some/where/alias/", True),
        (("alias",), "alias/", True),
        (("alias",), "alias/other", False),
        (("alias",), "lias", False),
        (("org/name",), "name", True),
        (("org/name",), "org/name/", True),
        (("org/name",), "other/name", False),
        (("org/name",), "org", False),
        (("./models/name/",), "./models/name", True),
        (("./models/name/",), "name", True),
        (("/models/name",), "models/name", False),
        (("name", "/models/name"), "models/name", True),
        (("/",), "/", False),
        (("org/name",), "name:latest", True),
        (("name",), "org/name:latest", True),
        (("name:latest",), "name", True),
        (("name",), "name:4b", False),
        (("name",), ":latest", False),
        (("Org/Name-4B",), "org/name-4b", True),
        (("Org/Name-4B",), "NAME-4B:latest", True),
        (("name",), "NAME:LATEST", True),
        (("/Models/Name",), "/models/name/", True),
        (("Org/Name",), "other/NAME", False),
    ],
)
def test_a_name_may_have_its_owner_or_not(names: tuple[str, ...], asked: str, ours: bool) -> None:
    assert ServedModel(names, {}, frozenset()).is_called(asked) is ours
