"""People sign in to the pages with the company's OpenID Connect provider: authorization code with PKCE.

`provider` speaks with it, `cookies` seals what a browser keeps for us, `people` puts both together. Nothing is kept on
this side: a session is a signed cookie, and what its person may do is asked of the grants at every request.
"""
