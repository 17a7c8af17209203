"""Three passages, two questions, two orders: what is encoded once is reused wherever it stands."""

from blend import Blender

PASSAGES = [
    "The Otterbeck ferry has crossed the Sall since 1871. Its pilot, Mira Tolle, keeps the logbook in a tin box.",
    "The Sall rises below Mount Keth and flows for ninety kilometres to the harbour of Drenn.",
    "Drenn's market hall burned down in 1903 and was rebuilt with a roof of green copper.",
]

with Blender.from_pretrained("smollm2") as blender:
    print(blender.encode(PASSAGES))
    for question, order in (("Who is the pilot of the ferry?", (0, 1, 2)), ("What is the roof made of?", (2, 0, 1))):
        prompt = blender.prompt(question, [PASSAGES[i] for i in order])
        answer = blender.generate(prompt, max_new_tokens=24, do_sample=False)
        print(question, "->", answer.text)
        print(answer.report)
