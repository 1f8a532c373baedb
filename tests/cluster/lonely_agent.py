"""An agent as a program that needs nothing but HTTP: three turns; what it was answered is noted in a file of its host.

python lonely_agent.py NOTES
"""

import json
import os
import sys
import time
import urllib.request


def main(notes: str) -> None:
    url, key = os.environ["ROLLBOOK_BASE_URL"], os.environ["ROLLBOOK_API_KEY"]
    with open(os.environ["ROLLBOOK_TASK_FILE"], encoding="utf-8") as file:
        messages = json.load(file)["messages"]
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    without_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _turn in range(3):
        body = json.dumps({"model": "m", "messages": messages}).encode()
        request = urllib.request.Request(f"{url}/chat/completions", data=body, headers=headers)
        with without_proxies.open(request, timeout=30) as response:
            reply = json.load(response)
        with open(notes, "a", encoding="utf-8") as file:  # one write: many of us append here
            file.write(f"{url} {reply['id']}\n")
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "again"}]
        time.sleep(0.3)
    with open(os.environ["ROLLBOOK_REWARD_FILE"], "w", encoding="utf-8") as file:
        file.write("1.0")


main(sys.argv[1])
