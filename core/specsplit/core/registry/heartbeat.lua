-- Keeps what a replica published alive, says its state, and forgets members that have vanished.
-- KEYS: members, replica, blocks    ARGV: prefix, name, incarnation, seq, state, ttl ms
-- Answers OK, GAP (what is held is not what was published), WRONG_INCARNATION or UNKNOWN.
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. 'r:' .. member) == 0 then
    redis.call('SREM', KEYS[1], member)
  end
end
local held, refusal = fence(KEYS[2], ARGV[3])
if refusal then
  return refusal
end
redis.call('SADD', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], 'state', ARGV[5])
keep_members(KEYS[1], ARGV[6])
redis.call('PEXPIRE', KEYS[2], ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[6])
if held.seq ~= ARGV[4] or redis.call('SCARD', KEYS[3]) ~= held.blocks then
  return 'GAP'
end
return 'OK'
