"""Four clients with long texts at once, on one server, and the page that shows what it still holds.

    make serve-demo        or: python examples/serving/four_clients.py [--rounds 1] [--no-browser]

Starts `windlass serve` with the shipped model: four rows of 256 tokens. Each client sends another piece of the novel,
of some thousand tokens, and reads what the model goes on with. Ctrl-C ends it.
"""

import argparse
import http.client
import json
import lzma
import subprocess
import sys
import threading
import time
import webbrowser
from pathlib import Path

import windlass

ASSETS = Path(windlass.__file__).parent / "assets"
CLIENTS, BUDGET, WORDS = 4, 256, 6000


def client(port: int, number: int, words: list[str]) -> None:
    """Send a long text, and print what came of it."""
    start = number * len(words) // CLIENTS
    body = {"model": "finder-3m", "prompt": " ".join(words[start : start + WORDS]), "max_tokens": 200}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.load(connection.getresponse())
    connection.close()
    usage, text = answer["usage"], " ".join(answer["choices"][0]["text"].split())
    own = usage["windlass"]
    print(f"client {number}: {own['seen']:,} tokens seen, {own['kept']} kept, {own['bytes']:,} bytes: {text[:60]} ...")


def main() -> int:
    """Serve, ask, and wait."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=0, help="how often each client asks; 0: until Ctrl-C")
    parser.add_argument("--browser", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    words = lzma.decompress((ASSETS / "three_men_in_a_boat.txt.xz").read_bytes()).decode().split()
    command = [sys.executable, "-m", "windlass", "serve", str(ASSETS / "finder-3m"), "--view", "--quiet"]
    command += ["--rows", str(CLIENTS), "--budget", str(BUDGET), "--chunk", "128", "--port", str(options.port)]
    server = subprocess.Popen(command)
    try:
        wait_for(options.port, server)
        print(f"the page: http://127.0.0.1:{options.port}/")
        if options.browser:
            webbrowser.open(f"http://127.0.0.1:{options.port}/")
        rounds = 0
        while not options.rounds or rounds < options.rounds:
            threads = [threading.Thread(target=client, args=(options.port, number, words)) for number in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rounds += 1
    except KeyboardInterrupt:
        print("ended")
    finally:
        server.terminate()
        server.wait(30)
    return 0


def wait_for(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Until the server answers. Raises: SystemExit where it has ended before."""
    while True:
        if server.poll() is not None:
            raise SystemExit(server.returncode)
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            connection.getresponse().read()
            return
        except OSError:
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
