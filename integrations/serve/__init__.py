"""An OpenAI-compatible HTTP server for one artifact: `nstf serve F`.

errors.py     what a client is told            protocol.py  requests, checked
output.py     tokens to text, stop strings     grammar.py   JSON-schema output by llguidance
scheduler.py  continuous batching on the CPU engine         modules.py   one request at a time by transformers
app.py        routes, limits, streaming        metrics.py   counters in Prometheus' text format
"""
