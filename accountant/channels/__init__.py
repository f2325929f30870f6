"""Delivers messages: a module for each medium (a folder, mail, chats).

Read `protocol` first: a channel takes a `Message` and delivers it, or says that it did not, or that it may have. `mail`
is the longest example, a chat the shortest. A channel of another package is chosen in the same way
(docs/plugins/channel.md)."""
