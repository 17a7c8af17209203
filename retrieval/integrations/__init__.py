"""kvblend inside LangChain, LlamaIndex and Haystack: retrieved documents reach the model as separate chunks.

One module a library, imported by whoever has that library: ``retrieval.integrations.langchain``, ``.llamaindex``,
``.haystack``. None of them retrieves; the library's own retrievers stay as they are.
"""
