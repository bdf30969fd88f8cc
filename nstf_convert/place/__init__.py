"""Which devices of a machine hold which part of a model: plans, what they are predicted to take, and the best of them.

machine.py    the machine as a graph of devices and links, from a JSON file (`machines/` has examples)
fabric.py     what transfers and collectives take on that graph
measure.py    the same file measured on this machine
costs.py      what a model asks for, from an artifact's header or from a config.json
products.py   what a product with an encoded matrix takes on a device
plans.py      ways to divide a model: tensor parallel, pipeline, experts, and their products
predict.py    seconds of a token and of a prompt under a plan
split.py      layers to the stages of a pipeline
search.py     the best plans
export.py     plans as JSON, and as arguments of engines
"""
