"""Sixty-four requests of four kinds, short, so that a diagnosis needs nobody's data: what trials are recorded on.

They only have to make the target write. Kinds are told apart because a draft may be good at some of them alone.
"""

BY_KIND = {
    "code": (
        "Write a Python function that returns the n-th Fibonacci number.",
        "How do I reverse a linked list in C?",
        "Write an SQL query that counts orders per customer.",
        "Explain recursion with an example.",
        "Write a JavaScript function that removes duplicates from an array.",
        "Write a unit test in Python for a function add(a, b).",
        "Explain the difference between a list and a tuple in Python.",
        "Write a bash command that finds all files larger than 100 MB.",
        "Explain what an API is.",
        "Write a CSS rule that centres a box on a page.",
        "Write a class in Java that represents a bank account.",
        "Explain the difference between HTTP and HTTPS.",
        "Write a regular expression that matches an e-mail address and explain it.",
    ),
    "numbers": (
        "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
        "Tom has 12 apples, gives away a third and buys 5 more. How many has he now? Show the steps.",
        "A rectangle is 7 cm by 12 cm. Compute its area and perimeter.",
        "If 3x + 7 = 22, what is x? Explain each step.",
        "How many minutes are there in a leap year? Show the calculation.",
        "A shop gives 15 % off a coat of 80 euros. What does it cost?",
    ),
    "writing": (
        "Write a short story about a lighthouse keeper who finds a letter.",
        "Translate into French: Where is the nearest pharmacy?",
        "Write a polite e-mail asking a colleague to move a meeting to Thursday.",
        "Write a haiku about rain.",
        "Write the beginning of a detective story set in Lisbon.",
        "Write a thank-you note to a teacher.",
        "Describe a sunset without naming any colour.",
        "Write a dialogue between a cat and a dog about dinner.",
        "Rewrite in a formal tone: hey, can u send me that file asap?",
        "Write a product description for a wooden desk lamp.",
        "Write a limerick about a programmer.",
        "Write instructions for tying a bow tie.",
        "Write a speech of one minute for the opening of a library.",
    ),
    "knowledge": (
        "Explain why the sky is blue to a child of eight.",
        "Give me a recipe for a simple tomato soup.",
        "Summarise the water cycle in five sentences.",
        "What are the main differences between a virus and a bacterium?",
        "List ten verbs that describe ways of walking.",
        "What is photosynthesis?",
        "Describe the rules of chess for a beginner.",
        "Why do leaves change colour in autumn?",
        "Compare tea and coffee in a small table.",
        "What should I pack for a weekend in the mountains?",
        "Who was Marie Curie and what is she known for?",
        "Give three arguments for and three against working from home.",
        "What is the difference between weather and climate?",
        "Explain how a bicycle stays upright.",
        "Suggest names for a bakery and say why each fits.",
        "What happened in 1969?",
        "How does a refrigerator work?",
        "What are the stages of a butterfly's life?",
        "Give advice to someone who starts learning the piano.",
        "What is inflation and what causes it?",
        "Describe the planets of the solar system, one line each.",
        "What makes a good password?",
        "Tell me about the history of the printing press.",
        "What are the benefits of regular exercise?",
        "Explain Newton's three laws of motion.",
        "Why is biodiversity important?",
        "Plan three days in Rome for a family with two children.",
        "What is the capital of Australia, and why is it not Sydney?",
        "How do vaccines work?",
        "Describe how bread is made, from grain to loaf.",
        "What would happen if the Moon disappeared?",
        "List five common logical fallacies with an example of each.",
    ),
}
_SPREAD = sorted(
    ((i + 0.5) / len(texts), kind, text) for kind, texts in BY_KIND.items() for i, text in enumerate(texts)
)
PROMPTS = tuple(text for _, _, text in _SPREAD)
"""Every kind spread evenly over the whole."""
KINDS = {text: kind for _, kind, text in _SPREAD}
