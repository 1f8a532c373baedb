"""The synchronous agent of `agents.py`, in a module of its own as agents are: workers import nothing else for it."""

import http.client
import json


def blocking(data, base_url, api_key):
    """A synchronous agent: in its worker process it has one connection for all its turns."""
    host, _, path = base_url.removeprefix("http://").partition("/")
    messages, headers = list(data["messages"]), {"authorization": f"Bearer {api_key}"}
    connection = http.client.HTTPConnection(host, timeout=120)
    for _ in range(data["n_turns"]):
        connection.request(
            "POST", f"/{path}/chat/completions", json.dumps({"model": "m", "messages": messages}), headers
        )
        reply = json.load(connection.getresponse())
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    connection.close()
    return 1.0
