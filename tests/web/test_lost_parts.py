"""Parts of a network in real Ray processes: killed, stopped and switched off."""

import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from support.data_files import encoded

from hsvit_jax import classifier, data
from hsvit_jax.train import evaluate

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def test_split():
    return data.load("digits").test


def answers(served, split, lost=""):
    """Labels and probabilities (B, 5), and votes, of all images."""
    found = []
    files = [("files", encoded(image)) for image in split.images[..., 0]]
    for start in range(0, len(files), 16):
        answer = served.predict(files[start : start + 16], lost=lost)
        assert answer.status_code == 200, answer.text
        found += answer.json()["predictions"]
    return found


def test_lost_parts_cost_what_lost_groups_do(served, test_split):
    """Probabilities are predict's, and without parts those of `eval --drop_groups`."""
    c = classifier.load("zoo:c2a2-digits", devices=jax.devices()[:1])
    for lost in ((), (2,), (0, 3), (0, 1, 3)):
        votes_G = np.repeat([float(part not in lost) for part in range(4)], 4)
        forward = evaluate.make_forward(c.model, c.mesh, c.config, votes_G=votes_G)
        p_BK = np.asarray(jax.nn.softmax(forward(c.params, c.stats, test_split.images)))
        found = answers(served, test_split, ",".join(map(str, lost)))
        assert {one["votes"]["voted"] for one in found} == {16 - 4 * len(lost)}
        p_B5 = [[top["probability"] for top in one["top"]] for one in found]
        np.testing.assert_allclose(p_B5, np.sort(p_BK)[:, :-6:-1], atol=2e-5)
        labels = np.array([int(one["top"][0]["label"]) for one in found])
        assert (labels == test_split.labels).mean() == (p_BK.argmax(1) == test_split.labels).mean()


class Load:
    """Requests one after the other in four threads, with their statuses, votes and seconds."""

    def __init__(self, served, split):
        self.served, self.file = served, [("files", encoded(split.images[0, ..., 0]))]
        self.seen, self.going = [], True
        self.threads = [threading.Thread(target=self.send) for _ in range(4)]

    def send(self):
        while self.going:
            started = time.monotonic()
            answer = self.served.predict(self.file)
            votes = answer.json()["predictions"][0]["votes"]["voted"] if answer.is_success else 0
            self.seen.append((answer.status_code, votes, time.monotonic() - started))

    def until(self, votes, seconds=120):
        """Waits until an answer has so many votes."""
        first, end = len(self.seen), time.monotonic() + seconds
        while votes not in {seen[1] for seen in self.seen[first:]}:
            assert time.monotonic() < end, f"no answer with {votes} votes"
            time.sleep(0.05)

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        self.until(16)
        return self

    def __exit__(self, *_):
        self.going = False
        for thread in self.threads:
            thread.join()


def test_a_killed_part_costs_votes_and_comes_back(served, test_split):
    with Load(served, test_split) as load:
        os.kill(served.replica(1), signal.SIGKILL)
        load.until(12)
        load.until(16)
    assert {status for status, _, _ in load.seen} == {200}
    assert {votes for _, votes, _ in load.seen} == {12, 16}


def test_a_stopped_part_costs_the_deadline_once(served, test_split):
    replica = served.replica(2)
    with Load(served, test_split) as load:
        before = max(seconds for _, _, seconds in load.seen)
        os.kill(replica, signal.SIGSTOP)
        try:
            load.until(12)
            time.sleep(3)
        finally:
            os.kill(replica, signal.SIGCONT)
        load.until(16)
    assert {status for status, _, _ in load.seen} == {200}
    late = [seconds for _, _, seconds in load.seen if seconds > served.deadline]
    assert len(late) <= 4  # one of each thread
    assert max(late) < served.deadline + max(1.0, 3 * before)


def test_without_any_vote_the_answer_is_503(served, test_split):
    replicas = [served.replica(part) for part in range(4)]
    try:
        for replica in replicas:
            os.kill(replica, signal.SIGSTOP)
        answer = served.predict([("files", encoded(test_split.images[0, ..., 0]))])
        assert answer.status_code == 503 and "answered" in answer.json()["error"]
    finally:
        for replica in replicas:
            os.kill(replica, signal.SIGCONT)
    with Load(served, test_split):  # all vote again
        pass


def test_the_page_marks_a_killed_part(served, browser, test_split):
    page = browser.new_page()
    page.goto(served.address)
    picture = encoded(test_split.images[0, ..., 0])
    image = {"name": "a.png", "mimeType": "image/png", "buffer": picture}
    for votes in (16, 12, 16):
        page.locator("#parts li").nth(3).wait_for()
        page.set_input_files("#file", image)
        page.locator("#votes", has_text=f"({votes} of 16 groups").wait_for()
        gone = page.locator("#parts .gone").all_inner_texts()
        assert [text.split()[-2:] for text in gone] == [["no", "answer"]] * (votes == 12)
        if votes == 16:
            os.kill(served.replica(3), signal.SIGKILL)
        else:
            with Load(served, test_split):  # until all vote again
                pass
        page.reload()
    page.close()
