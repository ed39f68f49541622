-- Removes all that a replica published.
-- KEYS: members, replica, blocks    ARGV: name, incarnation
-- Answers OK, WRONG_INCARNATION or UNKNOWN.
local held = redis.call('HGET', KEYS[2], 'incarnation')
if not held then
  return 'UNKNOWN'
end
if held ~= ARGV[2] then
  return 'WRONG_INCARNATION'
end
redis.call('UNLINK', KEYS[2], KEYS[3])
redis.call('SREM', KEYS[1], ARGV[1])
return 'OK'
