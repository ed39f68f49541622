-- Puts a collected snapshot in the place of the set in use.
-- KEYS: replica, blocks, collected    ARGV: incarnation, seq, number of blocks
-- Answers OK, STALE, GAP (a part is missing), WRONG_INCARNATION or UNKNOWN; only OK changes anything.
local held, refusal = fence(KEYS[1], ARGV[1])
if refusal then
  return refusal
end
if tonumber(ARGV[2]) <= (tonumber(held.seq) or -1) then
  return 'STALE'
end
if redis.call('SCARD', KEYS[3]) ~= tonumber(ARGV[3]) then
  return 'GAP'
end
redis.call('UNLINK', KEYS[2])
if tonumber(ARGV[3]) > 0 then
  redis.call('RENAME', KEYS[3], KEYS[2])
  redis.call('PEXPIRE', KEYS[2], redis.call('PTTL', KEYS[1]))
end
redis.call('HSET', KEYS[1], 'seq', ARGV[2], 'blocks', ARGV[3])
return 'OK'
