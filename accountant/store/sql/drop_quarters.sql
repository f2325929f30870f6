-- incoming: tag, gpu, at_ms.
DELETE FROM quarter USING incoming i WHERE quarter.gpu = i.gpu AND quarter.at_ms = i.at_ms
