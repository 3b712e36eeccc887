import httpx2

from tests.server.harness import CHAT


async def test_a_slash_at_the_end_of_a_path_is_no_other_path(http: httpx2.AsyncClient) -> None:
    for path in (CHAT, "/v1/responses", "/v1/messages/count_tokens", "/tokenize"):
        assert (await http.post(f"{path}/", json={})).status_code == 400
    for path in ("/health/", "/v1/models//", "/v1/models/recall/"):
        assert (await http.get(path)).status_code == 200
