-- Adds and removes blocks, all or none, so that the set stays closed under prefixes.
-- KEYS: replica, blocks    ARGV: incarnation, seq, added hashes, removed hashes
-- Answers OK, DUPLICATE, STALE, GAP, WRONG_INCARNATION or UNKNOWN; only OK changes anything.
local held, refusal = fence(KEYS[1], ARGV[1])
if refusal then
  return refusal
end
local seq, next = tonumber(held.seq) or -1, tonumber(ARGV[2])
if next == seq then
  return 'DUPLICATE'
end
if next < seq then
  return 'STALE'
end
if next > seq + 1 or redis.call('SCARD', KEYS[2]) ~= held.blocks then
  return 'GAP'
end
each('SREM', KEYS[2], ARGV[4])
each('SADD', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], 'seq', next, 'blocks', redis.call('SCARD', KEYS[2]))
redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
return 'OK'
