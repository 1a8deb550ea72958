"""The gateway process: OpenAI's and Anthropic's API over HTTP. A client of the coordinator like any other."""
