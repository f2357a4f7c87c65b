"""A Prometheus of Debian that scrapes one node on loopback."""

import json
import pathlib
import re
import subprocess
import urllib.parse
import urllib.request

from .broker import TOP
from .wait import wait_until

CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: rabbitmq
    static_configs: [{{targets: ["127.0.0.1:{target}"]}}]
  - job_name: rabbitmq-detailed
    metrics_path: /metrics/detailed
    params: {{family: [stream_s3_metrics]}}
    static_configs: [{{targets: ["127.0.0.1:{target}"]}}]
"""


class Prometheus:
    """Runs while the `with` block does. `rules`: text of a file of rules."""

    def __init__(self, folder, port, target, rules):
        self.folder, self.port = pathlib.Path(folder), port
        self.folder.mkdir(parents=True)
        (self.folder / "rules.yml").write_text(rules)
        (self.folder / "prometheus.yml").write_text(CONFIG.format(rules=self.folder / "rules.yml", target=target))

    def __enter__(self):
        made = subprocess.run([TOP / "scripts/lib/make-prometheus"], check=True, stdout=subprocess.PIPE, text=True)
        with open(self.folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [
                    pathlib.Path(made.stdout.strip()) / "prometheus", f"--config.file={self.folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.folder / 'data'}", f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log, stderr=log,
            )
        wait_until(lambda: self._is_ready(), 30, "Prometheus is ready")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def _is_ready(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()[-2000:]
        try:
            return self.query("count(up == 1) == 2") != []
        except OSError:
            return False

    def api(self, path, **parameters):
        """The data of an answer of its API."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        """(labels, number) of each sample that the expression gives now."""
        return [(sample["metric"], float(sample["value"][1])) for sample in self.api("query", query=expression)["result"]]

    def rules(self):
        """The rules as Prometheus knows them."""
        return [rule for group in self.api("rules")["groups"] for rule in group["rules"]]

    def firing(self):
        """Names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self.api("alerts")["alerts"] if alert["state"] == "firing"}


def at_once(rules, but):
    """The rules without the time that they wait, but for these."""
    parts = re.split(r"(?=^      - alert: )", rules, flags=re.M)
    return "".join(part if any(f"alert: {name}\n" in part for name in but) else re.sub(r"^ +for: .*\n", "", part, flags=re.M) for part in parts)
