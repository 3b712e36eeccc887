"""The replicas beside the memory, as a cluster's front lists them."""

from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.page.checks.steps import FAILED_LOAD, accessible, get, no_overflow
from tests.page.visit import NARROW, Browser, shot

LIST = "/cluster/replicas"


def replica(name: str, state: str, **figures: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("running", "waiting", "free_blocks", "total_blocks"), 0)
    tokens = {"prompt_tokens": 0, "cached_tokens": 0}
    return {"name": name, "host": None, "state": state, **nothing, **tokens} | figures


THREE = [
    replica("a1b2c3d4", "silent", host="mac-1", heard_s_ago=12.4, running=2, total_blocks=1600),
    replica(
        "b2c3d4e5", "up", host="mac-2", heard_s_ago=0.2, running=3, waiting=1, free_blocks=1200,
        total_blocks=1600, prompt_tokens=4000, cached_tokens=3001,
    ),
    replica("c3d4e5f6", "starting", heard_s_ago=None),
]  # fmt: skip


def replicas_are_listed_where_there_is_a_cluster(browser: Browser) -> None:
    with browser.page(browser.demo, expected=FAILED_LOAD) as page:
        expect(page.locator("#state")).to_have_text("Idle")
        expect(page.locator("#replicas-part")).to_be_hidden()
        told = {"model": "quire-demo", "replicas": THREE}
        a_cluster(page, browser.demo, told)
        page.reload()
        rows = page.locator("#replicas tr")
        expect(rows).to_have_count(3)
        expect(page.locator("#replicas-sum")).to_have_text(
            "1 of 3 replicas answer · the memory below is that of b2c3d4e5"
        )
        assert [row.locator("td").all_text_contents() for row in rows.all()] == [
            ["mac-1", "a1b2c3d4", "2", "0", "0 of 1,600", "–", "silent for 12.4 s"],  # noqa: RUF001
            ["mac-2", "b2c3d4e5", "3", "1", "1,200 of 1,600", "75 %", "answers"],
            ["–", "c3d4e5f6", "–", "–", "–", "–", "starts"],  # noqa: RUF001
        ]
        shot(page, "replicas")
        told["replicas"] = THREE[1:]
        expect(rows).to_have_count(2)
        page.route(f"**{LIST}", lambda route: route.abort())
        expect(page.locator("#replicas-sum")).to_have_text("What is shown is from before.")
        expect(rows).to_have_count(2)


def the_list_of_replicas_is_accessible_and_fits(browser: Browser) -> None:
    for dark in (False, True):
        with browser.page(browser.demo, dark=dark) as page:
            a_cluster(page, browser.demo, {"model": "quire-demo", "replicas": THREE})
            page.reload()
            expect(page.locator("#replicas tr")).to_have_count(3)
            accessible(page)
            page.set_viewport_size(NARROW)
            page.get_by_role("button", name="Memory").click()
            expect(page.locator("#replicas tr").last).to_be_visible()
            accessible(page)
            no_overflow(page)
            shot(page, f"narrow-replicas-{'dark' if dark else 'light'}")


def a_cluster(page: Page, address: str, told: dict[str, Any]) -> None:
    """Make the server one with replicas. told: its list of them."""

    def version(route: Route) -> None:
        route.fulfill(json=get(address, "/version") | {"replicas": LIST})

    page.route("**/version", version)
    page.route(f"**{LIST}", lambda route: route.fulfill(json=told))
