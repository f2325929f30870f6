-- incoming: tag, gpu, at_ms.
DELETE FROM hour USING incoming i WHERE hour.gpu = i.gpu AND hour.at_ms = i.at_ms
